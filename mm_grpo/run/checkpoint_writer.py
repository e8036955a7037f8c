"""The files of a checkpoint: each process writes its share, and the first one renames the folder when all is there.

All processes take part, in the training thread or in one that writes while training goes on: `ranks` belong to that
thread. Nothing here looks at the learner; what is written was put together before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write, remove
from mm_grpo.learner.state import StateFile, mark_of
from mm_grpo.run.manifest import LOG, MANIFEST, REFERENCE, checkpoints_in, step_of
from mm_grpo.run.paths import left_in
from mm_grpo.timing import span


@dataclass(frozen=True)
class CheckpointContents:
    """What this process writes of the checkpoint of a step.

    `manifest` is what the manifest holds but for files, `log` metrics.jsonl; of the processes the first
    writes these and `reference`. That of the step `spared`, if there is one, is not removed, however old it is.
    """

    step: int
    manifest: Mapping[str, Any]
    state: StateFile
    reference: StateFile | None
    log: bytes | None
    spared: int | None


class CheckpointWriter:
    """Writes checkpoints to `folder`, of which the newest `keep` stay. `ranks` are those of the thread that writes."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks

    @span("writing")
    def write(self, contents: CheckpointContents, require_open: Callable[[], None] | None = None) -> Path:
        """Write a checkpoint and remove those that are older than `keep` allows. Collective.

        Those of later steps go too: the run went on from before them, so they were damaged. `require_open` is called
        before the folder gets its name, and may raise. Raises ConfigError when the checkpoint cannot be written; what
        was there before is then untouched.
        """
        path = self.folder / f"step-{contents.step:06d}"
        beside = self.folder / f".{path.name}.new"
        try:
            with self._together():
                if self.ranks.first:
                    for left in left_in(self.folder):
                        with suppress(OSError):  # one that somebody holds, on a shared disk
                            remove(left)
                    self.folder.mkdir(
                        exist_ok=True
                    )  # and not the run's folder, should that have been removed
                    beside.mkdir()
            with self._together():
                entry, reference = self._write_share(beside, contents)
            entries = self.ranks.all_gather(entry, "a checkpoint")
            with self._together():
                if require_open is not None:
                    require_open()
                if self.ranks.first:
                    self._finish(beside, path, contents, entries, reference)
                    self._remove_old(contents.step, contents.spared)
        except BaseException:
            if self.ranks.first:
                shutil.rmtree(beside, ignore_errors=True)
            raise
        return path

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A part of the work of all processes; what one of them cannot write is a ConfigError on all."""
        with self.ranks.fail_together("a checkpoint"):
            try:
                yield
            except OSError as error:
                listed = [*checkpoints_in(self.folder).values()]
                kept = f"the last good one is {listed[-1].name}" if listed else "there is none before it"
                raise ConfigError(
                    f"run.dir = '{self.folder.parent}': a checkpoint cannot be written ({error.strerror or error}); "
                    f"{kept}. Make room, or lower run.keep_checkpoints, and resume"
                ) from None

    def _write_share(
        self, beside: Path, contents: CheckpointContents
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Write this process's files; returns the manifest's entries of its state and of the reference."""
        name = f"state-{self.ranks.rank:05d}-of-{self.ranks.world:05d}.safetensors"
        if not beside.is_dir():
            raise ConfigError(
                f"run.dir = '{self.folder.parent}': process {self.ranks.rank} does not see the folder that the first "
                "process made there; name one that all hosts share"
            )
        entry = contents.state.write(beside / name).as_dict()
        if contents.reference is None:
            return entry, None
        return entry, contents.reference.write(beside / REFERENCE).as_dict()

    def _finish(
        self,
        beside: Path,
        path: Path,
        contents: CheckpointContents,
        entries: Sequence[Mapping[str, Any]],
        reference: Mapping[str, Any] | None,
    ) -> None:
        manifest = {**contents.manifest, "reference": reference, "files": list(entries), "log": None}
        if contents.log is not None:
            atomic_write(beside / LOG, contents.log)
            manifest["log"] = mark_of(beside / LOG).as_dict()
        atomic_write(beside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        _sync(beside)
        remove(path)  # the step is taken again, so this one was not whole
        os.replace(beside, path)
        _sync(self.folder)

    def _remove_old(self, step: int, spared: int | None) -> None:
        listed = [*checkpoints_in(self.folder).values()]
        done = [path for path in listed if step_of(path) <= step]
        for old in [*done[: -self.keep], *listed[len(done) :]]:
            if step_of(old) != spared:
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
