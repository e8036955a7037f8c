"""The files of a checkpoint: each process writes its share, and the first one renames the folder when all is there.

Nothing here looks at the learner; what is written was put together before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write, remove
from mm_grpo.learner.state import StateFile, mark_of
from mm_grpo.run.manifest import LOG, MANIFEST, checkpoints_in, manifest_text, step_of
from mm_grpo.run.paths import left_in


@dataclass(frozen=True)
class CheckpointContents:
    """What this process writes of the checkpoint of a step.

    `manifest` is what the manifest holds but for files, `log` metrics.jsonl; of the processes the first
    writes these. Of older checkpoints the newest `keep` stay, and that of the step `spared`.
    """

    step: int
    manifest: Mapping[str, Any]
    state: StateFile
    log: bytes | None
    keep: int
    spared: int | None


def write_checkpoint(folder: Path, contents: CheckpointContents, ranks: Ranks) -> Path:
    """Write a checkpoint to `folder` and remove those that are older than it keeps. Collective.

    Those of later steps go too: the run went on from before them, so they were damaged. Raises ConfigError when the
    checkpoint cannot be written; what was there before is then untouched.
    """
    path = folder / f"step-{contents.step:06d}"
    beside = folder / f".{path.name}.new"

    @contextmanager
    def together() -> Iterator[None]:
        """A part of the work of all processes; what one of them cannot write is a ConfigError on all."""
        with ranks.fail_together("a checkpoint"):
            try:
                yield
            except OSError as error:
                listed = [*checkpoints_in(folder).values()]
                kept = f"the last good one is {listed[-1].name}" if listed else "there is none before it"
                raise ConfigError(
                    f"run.dir = '{folder.parent}': a checkpoint cannot be written ({error.strerror or error}); "
                    f"{kept}. Make room, or lower run.keep_checkpoints, and resume"
                ) from None

    try:
        with together():
            if ranks.first:
                for left in left_in(folder):
                    with suppress(OSError):  # one that somebody holds, on a shared disk
                        remove(left)
                folder.mkdir(exist_ok=True)  # and not the run's folder, should that have been removed
                beside.mkdir()
        with together():
            if not beside.is_dir():
                raise ConfigError(
                    f"run.dir = '{folder.parent}': process {ranks.rank} does not see the folder that the first "
                    "process made there; name one that all hosts share"
                )
            name = f"state-{ranks.rank:05d}-of-{ranks.world:05d}.safetensors"
            entry = contents.state.write(beside / name)
        entries = ranks.all_gather(entry, "a checkpoint")
        with together():
            if ranks.first:
                _finish(beside, path, contents, entries)
                _remove_old(folder, contents)
    except BaseException:
        if ranks.first:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return path


def _finish(
    beside: Path, path: Path, contents: CheckpointContents, files: Sequence[Mapping[str, Any]]
) -> None:
    manifest = {**contents.manifest, "files": files, "log": None}
    if contents.log is not None:
        atomic_write(beside / LOG, contents.log)
        manifest["log"] = mark_of(beside / LOG)
    atomic_write(beside / MANIFEST, manifest_text(manifest))
    _sync(beside)
    remove(path)  # the step is taken again, so this one was not whole
    os.replace(beside, path)
    _sync(path.parent)


def _remove_old(folder: Path, contents: CheckpointContents) -> None:
    listed = [*checkpoints_in(folder).values()]
    done = [path for path in listed if step_of(path) <= contents.step]
    for old in [*done[: -contents.keep], *listed[len(done) :]]:
        if step_of(old) != contents.spared:
            left = old.with_name(f".{old.name}.old")
            with suppress(OSError):  # then it stays as it is
                os.replace(old, left)
            shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
