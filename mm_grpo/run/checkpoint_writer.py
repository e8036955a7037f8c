"""The files of a checkpoint: each process writes its share, and the first one renames the folder when all is there.

All processes take part, in the training thread or in one that writes while training goes on: `ranks` belong to that
thread. Nothing here looks at the learner; what is written was put together before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write
from mm_grpo.learner.state import FileMark, StateFile, mark_of
from mm_grpo.run.manifest import LOG, MANIFEST, REFERENCE, checkpoints_in, digest_of, step_of
from mm_grpo.run.paths import left_in
from mm_grpo.timing import span


@dataclass(frozen=True)
class CheckpointContents:
    """What this process writes of the checkpoint of a step.

    `manifest` is what the manifest holds but for marks and its digest, `log` metrics.jsonl; of the processes the first
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
            with self.ranks.fail_together("a checkpoint"):
                if self.ranks.first:
                    self._make_room(beside)
            with self.ranks.fail_together("a checkpoint"):
                mark = self._write_share(beside, contents.state)
                reference = self._write_reference(beside, contents.reference)
            marks = self.ranks.all_gather(mark, "a checkpoint")
            with self.ranks.fail_together("a checkpoint"):
                if require_open is not None:
                    require_open()
                if self.ranks.first:
                    manifest = {**contents.manifest, "reference": reference}
                    self._finish(beside, path, manifest, marks, contents.log)
                    self._remove_old(contents.step, contents.spared)
        except BaseException:
            if self.ranks.first:
                shutil.rmtree(beside, ignore_errors=True)
            raise
        return path

    def _make_room(self, beside: Path) -> None:
        try:
            for left in left_in(self.folder):
                with suppress(OSError):  # one that somebody holds, on a shared disk
                    _remove(left)
            beside.mkdir(parents=True)
        except OSError as error:
            raise unwritten(self.folder, error) from None

    def _write_share(self, beside: Path, state: StateFile) -> FileMark:
        name = f"state-{self.ranks.rank:05d}-of-{self.ranks.world:05d}.safetensors"
        if not beside.is_dir():
            raise ConfigError(
                f"run.dir = '{self.folder.parent}': process {self.ranks.rank} does not see the folder that the first "
                "process made there; name one that all hosts share"
            )
        try:
            return state.write(beside / name)
        except OSError as error:
            raise unwritten(self.folder, error) from None

    def _write_reference(self, beside: Path, reference: StateFile | None) -> dict[str, Any] | None:
        if reference is None or not self.ranks.first:
            return None
        try:
            return reference.write(beside / REFERENCE).as_dict()
        except OSError as error:
            raise unwritten(self.folder, error) from None

    def _finish(
        self,
        beside: Path,
        path: Path,
        contents: Mapping[str, Any],
        marks: Sequence[FileMark],
        log: bytes | None,
    ) -> None:
        missing = [mark.name for mark in marks if not (beside / mark.name).is_file()]
        if missing:
            raise ConfigError(
                f"run.dir = '{self.folder.parent}': {', '.join(missing)} was written by another process and is not "
                "there; name a folder that all hosts share"
            )
        manifest = {**contents, "files": [mark.as_dict() for mark in marks], "log": None}
        try:
            if log is not None:
                atomic_write(beside / LOG, log)
                manifest["log"] = mark_of(beside / LOG).as_dict()
            manifest["sha256"] = digest_of(manifest)
            atomic_write(beside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
            _sync(beside)
            _remove(path)  # the step is taken again, so this one was not whole
            os.replace(beside, path)
            _sync(self.folder)
        except OSError as error:
            raise unwritten(self.folder, error) from None

    def _remove_old(self, step: int, spared: int | None) -> None:
        listed = [*checkpoints_in(self.folder).values()]
        done = [path for path in listed if step_of(path) <= step]
        for old in [*done[: -self.keep], *listed[len(done) :]]:
            if step_of(old) != spared:
                left = old.with_name(f".{old.name}.old")
                with suppress(OSError):  # then it stays as it is
                    os.replace(old, left)
                shutil.rmtree(left, ignore_errors=True)


def unwritten(folder: Path, error: OSError) -> ConfigError:
    """The message of a checkpoint in `folder` that cannot be written."""
    listed = [*checkpoints_in(folder).values()]
    kept = f"the last good one is {listed[-1].name}" if listed else "there is none before it"
    return ConfigError(
        f"run.dir = '{folder.parent}': a checkpoint cannot be written ({error.strerror or error}); {kept}. "
        "Make room, or lower run.keep_checkpoints, and resume"
    )


def _remove(path: Path) -> None:
    """Remove a folder, or a file or a link and not what it leads to; OSError when it stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
