"""The run folder as the trainer uses it: prepared before a model loads, locked, started, then written to.

The names are in paths.py; each file has a module of its own (see the package's docstring). What carries no mark of
a run (lock.py) is neither written over nor removed, and what a run reads may not lie in its folder. A run that is
there is replaced only when the user asked for it, and then only what a run writes is removed: notes beside it stay.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, atomic_folder, atomic_write, remove
from mm_grpo.run.environment import describe_environment
from mm_grpo.run.inputs import AnyPath, Inputs, refuse_inputs
from mm_grpo.run.lock import RunLock, RunMark, read_mark, refuse_running
from mm_grpo.run.metrics import append_event, append_row, cut_events, finite_or_text, write_summary
from mm_grpo.run.paths import IMAGE_NAME, ROLLOUT_NAME, STEP_NAME, RunPaths, left_in
from mm_grpo.run.rollout_log import write_rollouts
from mm_grpo.types import Group

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.rewards.spec import RewardSpec

FILES = (
    "config.yaml", "expected_curve.json", "environment.json", "metrics.jsonl", "events.jsonl", "summary.json",
    "error.txt", "report.html",
)  # fmt: skip
FOLDERS = ("rollouts", "tensorboard")
BY_CONFIG = ("checkpoints", "model", "adapter")
"""Written by some runs only."""
logger = logging.getLogger("mm_grpo")


def outputs_of(config: GRPOConfig, *, saves: bool) -> list[str]:
    """Those of BY_CONFIG that a run of this config writes; `saves` says whether it writes checkpoints."""
    model = config.run.save_model
    does = (saves, model, model and config.model.lora is not None)
    return [name for name, wanted in zip(BY_CONFIG, does, strict=True) if wanted]


class RunFolder:
    """One run's folder. `check` looks at it, `claim` and `start` make a run of it, `open` finds one that is there.

    `overwrite` allows `start` to replace the run that is there, and with `resume` that run goes on. `inputs` are the
    fields and paths that the run reads (its base model, its data): one that lies in the folder is refused. `writes` are
    the names of BY_CONFIG that the run will write. `expected` is the file of `run.expected_curve`, which is copied, so
    that the page needs the folder alone.
    """

    def __init__(
        self,
        dir: AnyPath,
        *,
        overwrite: bool = False,
        inputs: Inputs = (),
        resume: bool = False,
        writes: Collection[str] = BY_CONFIG,
        expected: AnyPath | None = None,
    ) -> None:
        self.paths = RunPaths(Path(dir))
        self._overwrite = overwrite
        self._resume = resume
        self._inputs = tuple(inputs)
        self._writes = (*FILES, *FOLDERS, *writes)
        self._lock: RunLock | None = None
        self._expected = expected

    @classmethod
    def open(cls, dir: AnyPath) -> RunFolder:
        """The run in `dir`; ConfigError when there is none."""
        folder = cls(dir)
        if not folder.paths.config.is_file():
            raise ConfigError(
                f"'{dir}' is no run folder: it has no config.yaml; name the run.dir of a run that was started"
            )
        return folder

    def check(self) -> None:
        """Check that a run may start here, or with `resume` go on; writes nothing.

        Raises ConfigError when a run is there and is not to be replaced, when a run is going on there, when files there
        are not a run's, when one of `inputs` lies there, or when there is a file at `dir`.
        """
        self._check()
        refuse_running(self.paths.root)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the folder's lock in the block. ConfigError as `check` raises it, and when it cannot be written."""
        if self._lock is not None:
            yield
            return
        self._check()
        with self.writing("the folder"):
            self._lock = RunLock(self.paths.root)
        try:
            self._check()
            yield
        finally:
            self._lock.release()
            self._lock = None

    def start(
        self, config_yaml: str, *, rewards: Sequence[Mapping[str, Any]] = (), sampler: str = ""
    ) -> RunFolder:
        """Write config.yaml and environment.json, after removing the run that may be replaced.

        `rewards` name the function of each reward, `sampler` what the engine draws with; environment.json keeps both.
        Raises ConfigError as `claim` does.
        """
        paths = self.paths
        environment = describe_environment() | {"sampler": sampler, "rewards": [dict(r) for r in rewards]}
        with self.claim(), self.writing("the folder"):
            assert self._lock is not None
            for left in _left_writes(paths) if self._lock.mark.wrote else ():
                left.unlink()
            if not self._resume:
                _remove_run(paths, self._lock.mark)
            self._lock.add(self._writes)
            atomic_write(paths.config, config_yaml)
            for former in (paths.expected, paths.error):  # of a run that goes on without it
                former.unlink(missing_ok=True)
            if self._expected is not None:
                atomic_write(paths.expected, Path(self._expected).read_bytes())
            atomic_write(paths.environment, json.dumps(environment, indent=2) + "\n")
        return self

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Turn a failed write of `what`, one of the run's files, into a ConfigError."""
        try:
            yield
        except Exception as error:
            # safetensors has an error of its own for what the system refused
            full = type(error).__name__ == "SafetensorError" and "os error" in str(error)
            if not isinstance(error, OSError) and not full:
                raise
            reason = re.sub(r"^\[Errno \d+\] ", "", str(error))
            raise ConfigError(
                f"run.dir = '{self.paths.root}': {what} cannot be written ({reason}); make room, let it be written or "
                "name another folder, and go on with --resume: what was written before is whole"
            ) from error

    def write_rollouts(self, step: int, groups: Sequence[Group], specs: Sequence[RewardSpec] = ()) -> Path:
        """See `rollout_log.write_rollouts`."""
        with self.writing("the rollouts"):
            return write_rollouts(self.paths, step, groups, specs)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """See `metrics.write_summary`."""
        with self.writing("summary.json"):
            write_summary(self.paths, summary)

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl (`metrics.append_row`); what is not finite as text."""
        with self.writing("metrics.jsonl"):
            append_row(self.paths.metrics, step, finite_or_text(metrics))

    def append_event(self, step: int, name: str, action: str, message: str) -> None:
        """See `metrics.append_event`."""
        with self.writing("events.jsonl"):
            append_event(self.paths.events, step, name, action, message)

    def replace_folder(self, name: str, write: Callable[[Path], None]) -> Path:
        """Let `write` fill `model` or `adapter`, which then takes the place of the old one.

        Where the folder is claimed, files in the old one that no run wrote are in the new one too.
        """
        path = self.paths.root / name

        def fill(new: Path) -> None:
            write(new)
            if self._lock is None:
                return
            users = _files_in(path, self._lock.mark, own=False)
            self._lock.add(f"{name}/{file.relative_to(new)}" for file in new.rglob("*") if file.is_file())
            for file in users:
                if not os.path.lexists(kept := new / file.relative_to(path)):
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, kept, follow_symlinks=False)

        with self.writing(f"{name}/"):
            atomic_folder(path, fill)
        return path

    def cut_after(self, step: int, log: bytes | None = None) -> None:
        """Forget what was logged after `step`: rows of metrics.jsonl, and rollout files.

        A run that resumes from the checkpoint of `step` takes those steps again. `log` is metrics.jsonl as that
        checkpoint kept it, None where it was not there yet: what differs from it is put back, with a warning. The
        images stay: they are named by their content.
        """
        path = self.paths.metrics
        with self.writing(path.name):
            found, kept = path.read_bytes() if path.is_file() else b"", log or b""
            if not found.startswith(kept):
                logger.warning(
                    "%s is not what the run wrote; it was put back from the checkpoint of step %d", path, step
                )
            elif lines := found[len(kept) :].splitlines():
                logger.warning(
                    "%s: %d lines after step %d are cut; those steps are taken again", path, len(lines), step
                )
            if found != kept:
                atomic_write(path, kept)
            cut_events(self.paths.events, step)
            for file in self.paths.rollouts.glob("*.jsonl"):
                if (match := ROLLOUT_NAME.fullmatch(file.name)) and int(match[2]) > step:
                    file.unlink()

    def _check(self) -> None:
        paths = self.paths
        with self.writing("the folder"):  # a name that is too long, a folder that may not be looked into
            way = (paths.root, *paths.root.parents)
            taken = [place for place in way if place.exists() and not place.is_dir()]
        if taken:
            raise ConfigError(
                f"run.dir = '{paths.root}': there is a file at '{taken[0]}'; name a folder that can be made"
            )
        refuse_inputs(paths.root, self._inputs)
        mark = self._lock.mark if self._lock is not None else read_mark(paths.root)
        foreign = [name for name in self._writes if _is_foreign(paths.root / name, own=mark.owns(name))]
        if foreign:
            names = ", ".join(f"{name}/" if (paths.root / name).is_dir() else name for name in foreign)
            raise ConfigError(
                f"run.dir = '{paths.root}' holds {names}, which no run wrote ({RUN_MARK}): somebody else's files are "
                "neither written over nor removed. Move them, or name another folder with run.dir=..."
            )
        found = _held(paths, mark)
        if found and not self._overwrite and not self._resume:
            raise ConfigError(
                f"run.dir = '{paths.root}' already holds a run ({', '.join(found)}); name another folder with"
                " run.dir=..., go on with this run with --resume, or replace it with run.overwrite=true"
            )


def _is_foreign(path: Path, *, own: bool) -> bool:
    """Whether something lies where a run writes, and no run wrote it.

    Such is also a pipe, for which a reader would wait, and a link to a file, which would be written through.
    """
    if not own:
        return _is_there(path)
    fits = path.is_dir() if path.name in (*FOLDERS, *BY_CONFIG) else path.is_file() and not path.is_symlink()
    return os.path.lexists(path) and not fits


def _is_there(path: Path) -> bool:
    """Whether something is at `path`; an empty folder is nothing."""
    return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))


def _held(paths: RunPaths, mark: RunMark) -> list[str]:
    """What of a run is there, in words; empty when the folder is new, or its run never took a step."""
    rows = paths.metrics.read_bytes().count(b"\n") if paths.metrics.is_file() else 0
    found = {"metrics.jsonl": f"{rows} rows in metrics.jsonl"} if rows else {}
    found |= {name: name for name in ("summary.json", *BY_CONFIG) if _is_there(paths.root / name)}
    return [words for name, words in found.items() if mark.owns(name)]


def _remove_run(paths: RunPaths, mark: RunMark) -> None:
    """Remove what runs wrote by the `mark` and nothing else; folders only once they are empty."""
    for path in _written(paths, mark):
        remove(path)
    for name in (*FOLDERS, *BY_CONFIG):
        top = paths.root / name
        for left in sorted([top, *top.rglob("*")], reverse=True):  # what is inside before what it is in
            if left.is_dir() and not left.is_symlink() and not any(left.iterdir()):
                left.rmdir()


def _left_writes(paths: RunPaths) -> list[Path]:
    """Files that a killed process did not get to rename (`atomic_write`), by the names of what runs write."""
    names = "|".join([*map(re.escape, FILES), ROLLOUT_NAME.pattern, IMAGE_NAME.pattern])
    folders = (paths.root, paths.rollouts, paths.images)
    files = (file for folder in folders for file in folder.glob(".*.tmp"))
    return [file for file in files if re.fullmatch(rf"\.({names})\.\d+\.tmp", file.name)]


def _written(paths: RunPaths, mark: RunMark) -> Iterator[Path]:
    rollouts = (*paths.rollouts.glob("*.jsonl"), *paths.images.glob("*.png"))
    checkpoints = (path for path in paths.checkpoints.glob("step-*") if STEP_NAME.fullmatch(path.name))
    outputs: dict[str, Iterable[Path]] = {
        **{name: [paths.root / name] for name in FILES},
        "rollouts": (path for path in rollouts if _is_rollout(path.name)),
        "checkpoints": (*checkpoints, *left_in(paths.checkpoints)),
        "tensorboard": paths.tensorboard.glob("events.out.tfevents.*"),
        "model": _files_in(paths.model, mark),
        "adapter": _files_in(paths.adapter, mark),
    }
    for name, found in outputs.items():
        if mark.owns(name):
            yield from found


def _files_in(folder: Path, mark: RunMark, *, own: bool = True) -> list[Path]:
    """The files in `model` or `adapter` that runs wrote, or with `own=False` all others; a link is one itself."""
    if folder.is_symlink():
        return [folder] if own else []
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in files if mark.owns(f"{folder.name}/{path.relative_to(folder)}") is own]


def _is_rollout(name: str) -> bool:
    return bool(ROLLOUT_NAME.fullmatch(name) or IMAGE_NAME.fullmatch(name))
