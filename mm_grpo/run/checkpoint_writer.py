"""Write the files of a checkpoint: each process writes its share, then the first one renames the folder.

The contents are collected before (checkpoint.py); this module does not read the learner.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write, remove
from mm_grpo.learner.state import StateFile, mark_of
from mm_grpo.run.manifest import LOG, MANIFEST, checkpoints_in, manifest_text, step_of
from mm_grpo.run.paths import left_in


def write_checkpoint(
    folder: Path,
    manifest: Mapping[str, Any],
    state: StateFile,
    log: bytes | None,
    ranks: Ranks,
    *,
    keep: int,
    spared: int | None,
) -> Path:
    """Write a checkpoint to `folder`, and remove all of later steps, and all but the `keep` newest. Collective.

    The first process adds the files to `manifest` and writes it, and `log`, the text of metrics.jsonl. The checkpoint
    of step `spared` stays too. Raises ConfigError if it cannot be written; older checkpoints are then untouched.
    """
    path = folder / f"step-{manifest['step']:06d}"
    tmp = folder / f".{path.name}.new"

    @contextmanager
    def together() -> Iterator[None]:
        """Raise a ConfigError on all processes if one of them cannot write."""
        with ranks.fail_together("a checkpoint"):
            try:
                yield
            except OSError as error:
                saved = [*checkpoints_in(folder).values()]
                last = f"the last good one is {saved[-1].name}" if saved else "there is none before it"
                raise ConfigError(
                    f"run.dir = '{folder.parent}': a checkpoint cannot be written ({error.strerror or error}); "
                    f"{last}. Make room, or lower run.keep_checkpoints, and resume"
                ) from None

    try:
        with together():
            if ranks.first:
                for unfinished in left_in(folder):
                    with suppress(OSError):  # another process may use it, on a shared disk
                        remove(unfinished)
                folder.mkdir(exist_ok=True)  # without parents: a removed run folder does not come back
                tmp.mkdir()
        with together():
            if not tmp.is_dir():
                raise ConfigError(
                    f"run.dir = '{folder.parent}': process {ranks.rank} does not see the folder that the first "
                    "process made there; name one that all hosts share"
                )
            name = f"state-{ranks.rank:05d}-of-{ranks.world:05d}.safetensors"
            entry = state.write(tmp / name)
        entries = ranks.all_gather(entry, "a checkpoint")
        with together():
            if ranks.first:
                _finish(tmp, path, {**manifest, "files": entries}, log)
                _remove_old(folder, manifest["step"], keep, spared)
    except BaseException:
        if ranks.first:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    return path


def _finish(tmp: Path, path: Path, manifest: Mapping[str, Any], log: bytes | None) -> None:
    if log is not None:
        atomic_write(tmp / LOG, log)
    log_mark = None if log is None else mark_of(tmp / LOG)
    atomic_write(tmp / MANIFEST, manifest_text({**manifest, "log": log_mark}))
    _sync(tmp)
    remove(path)  # a damaged one: otherwise the run would have resumed from it
    os.replace(tmp, path)
    _sync(path.parent)


def _remove_old(folder: Path, step: int, keep: int, spared: int | None) -> None:
    checkpoints = [*checkpoints_in(folder).values()]
    past = [path for path in checkpoints if step_of(path) <= step]
    # Checkpoints of later steps are damaged: otherwise the run would have resumed from one of them.
    for old in [*past[:-keep], *checkpoints[len(past) :]]:
        if step_of(old) != spared:
            removed = old.with_name(f".{old.name}.old")
            with suppress(OSError):  # then it stays as it is
                os.replace(old, removed)
            shutil.rmtree(removed, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Write a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
