"""Run folder: check it before a model loads, lock it, start a run in it, write its files.

Names are in paths.py; each file has a module of its own (see the package's docstring). Files without the mark of a run
(lock.py) are neither overwritten nor removed, and what a run reads may not be in its folder. An old run is replaced
only if the user asks for it, and then only files that a run wrote are removed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, atomic_folder, atomic_write, read_json, remove
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.environment import describe_environment
from mm_grpo.run.inputs import AnyPath, Inputs, refuse_inputs
from mm_grpo.run.lock import RunLock, RunMark, read_mark, refuse_running
from mm_grpo.run.metrics import append_event, append_row, cut_events, finite_or_text
from mm_grpo.run.paths import IMAGE_NAME, ROLLOUT_NAME, STEP_NAME, RunPaths, left_in
from mm_grpo.run.rollout_log import rollout_digests, write_rollouts
from mm_grpo.types import Group

FILES = (
    "config.yaml", "expected_curve.json", "environment.json", "metrics.jsonl", "events.jsonl", "summary.json",
    "error.txt", "report.html",
)  # fmt: skip
FOLDERS = ("rollouts", "tensorboard")
OPTIONAL_FOLDERS = ("checkpoints", "model", "adapter")
"""Folders that only some runs write."""
Save = Callable[[Path | None], None]
"""Writes a folder; in a process without one it takes part in the making of what is written."""
logger = logging.getLogger("mm_grpo")


def outputs_of(config: GRPOConfig, *, saves: bool) -> list[str]:
    """Return the OPTIONAL_FOLDERS that a run writes; `saves` if it writes checkpoints."""
    model = config.run.save_model
    is_written = (saves, model, model and config.model.lora is not None)
    return list(itertools.compress(OPTIONAL_FOLDERS, is_written))


class RunFolder:
    """Folder of one run. `check` inspects it, `claim` and `start` begin a run in it, `open` finds an existing run.

    `overwrite` allows `start` to replace an existing run, `resume` to continue it. `inputs` are the fields and paths
    that the run reads; none may be in the folder. `writes` are the OPTIONAL_FOLDERS that the run will write. `expected`
    is the file of `run.expected_curve`, which is copied to the folder.
    """

    def __init__(
        self,
        dir: AnyPath,
        *,
        overwrite: bool = False,
        inputs: Inputs = (),
        resume: bool = False,
        writes: Collection[str] = OPTIONAL_FOLDERS,
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
        """Return the folder of the existing run in `dir`. Raises ConfigError if there is none."""
        folder = cls(dir)
        if not folder.paths.config.is_file():
            raise ConfigError(
                f"'{dir}' is no run folder: it has no config.yaml; name the run.dir of a run that was started"
            )
        return folder

    def check(self) -> None:
        """Check that a run may start or resume here; write nothing.

        Raises ConfigError if there is a run that may not be replaced, a run is active there, foreign files would be
        overwritten, one of `inputs` is there, or `dir` is a file.
        """
        self._check()
        refuse_running(self.paths.root)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the folder's lock. Raises ConfigError as `check` does, and if the folder cannot be written."""
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
        """Remove a run that may be replaced, and write config.yaml and environment.json.

        `rewards`, each reward's function, and `sampler`, the engine's, are saved in environment.json. Raises
        ConfigError as `claim` does.
        """
        paths = self.paths
        environment = describe_environment() | {"sampler": sampler, "rewards": [dict(r) for r in rewards]}
        if self._resume:
            with suppress(OSError, ValueError):  # it is not there, or damaged
                environment["starts"] = read_json(paths.environment, dict).get("starts", [])
        with self.claim(), self.writing("the folder"):
            assert self._lock is not None
            for file in _temporary_files(paths) if self._lock.mark.wrote else ():
                file.unlink()
            if not self._resume:
                _remove_run(paths, self._lock.mark)
            self._lock.add(self._writes)
            atomic_write(paths.config, config_yaml)
            for file in (paths.expected, paths.error):  # a resumed run may have them
                file.unlink(missing_ok=True)
            if self._expected is not None:
                atomic_write(paths.expected, Path(self._expected).read_bytes())
            atomic_write(paths.environment, json.dumps(environment, indent=2) + "\n")
        return self

    def note_start(self, step: int, **facts: Any) -> None:
        """Add a start after `step` to the `starts` in environment.json; drop those after steps that are taken again."""
        environment = read_json(self.paths.environment, dict)
        starts = [start for start in environment.get("starts", ()) if start["step"] <= step]
        environment["starts"] = [*starts, {"step": step, **facts}]
        with self.writing("environment.json"):
            atomic_write(self.paths.environment, json.dumps(environment, indent=2) + "\n")

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Turn a failed write of `name`, one of the run's files, into a ConfigError."""
        try:
            yield
        except Exception as error:
            # safetensors turns an OSError into its own error
            is_os_error = type(error).__name__ == "SafetensorError" and "os error" in str(error)
            if not isinstance(error, OSError) and not is_os_error:
                raise
            reason = re.sub(r"^\[Errno \d+\] ", "", str(error))
            raise ConfigError(
                f"run.dir = '{self.paths.root}': {name} cannot be written ({reason}); make room, allow the write or "
                "name another folder; a run that had begun goes on with --resume, and what it wrote is intact"
            ) from error

    def write_rollouts(self, step: int, groups: Sequence[Group], specs: Sequence[RewardSpec] = ()) -> Path:
        """See `rollout_log.write_rollouts`."""
        with self.writing("the rollouts"):
            return write_rollouts(self.paths, step, groups, specs)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json (summary.py). Raises ValueError if a number is not finite."""
        text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
        with self.writing("summary.json"):
            atomic_write(self.paths.summary, text + "\n")

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl (`metrics.append_row`), with digests of the step's rollout files."""
        with self.writing("metrics.jsonl"):
            append_row(self.paths.metrics, step, finite_or_text(metrics) | rollout_digests(self.paths, step))

    def append_event(self, step: int, name: str, action: str, message: str) -> None:
        """See `metrics.append_event`."""
        with self.writing("events.jsonl"):
            append_event(self.paths.events, step, name, action, message)

    def replace_folder(self, name: str, write: Callable[[Path], None]) -> None:
        """Let `write` fill a new `model` or `adapter`, and replace the old folder by it.

        Files of the old folder that no run wrote are copied to the new one, if the folder is claimed.
        """
        path = self.paths.root / name

        def fill(new: Path) -> None:
            write(new)
            if self._lock is None:
                return
            foreign = _files_in(path, self._lock.mark, owned=False)
            self._lock.add(f"{name}/{file.relative_to(new)}" for file in new.rglob("*") if file.is_file())
            for file in foreign:
                if not os.path.lexists(copy := new / file.relative_to(path)):
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, copy, follow_symlinks=False)

        with self.writing(f"{name}/"):
            atomic_folder(path, fill)

    def replace_folders(self, saves: Mapping[str, Save], *, first: bool) -> None:
        """Replace folders by name in the first process. Each process runs all `saves`, which may be collective."""
        waiting = list(saves.values())
        try:
            for name in saves if first else ():
                self.replace_folder(name, lambda path: waiting.pop(0)(path))
        finally:  # after an error here the other processes still wait for this one's part
            while waiting:
                waiting.pop(0)(None)

    def cut_after(self, step: int, log: bytes | None = None) -> None:
        """Remove the logs after `step` from metrics.jsonl, events.jsonl and rollouts/ for a run that resumes there.

        `log` is metrics.jsonl in the checkpoint of `step`, None if it did not exist. If the file differs from it, it
        is replaced with a warning. Images stay, because they are named by their content.
        """
        path = self.paths.metrics
        with self.writing(path.name):
            current, saved = path.read_bytes() if path.is_file() else b"", log or b""
            if not current.startswith(saved):
                logger.warning(
                    "%s is not what the run wrote; it was put back from the checkpoint of step %d", path, step
                )
            elif lines := current[len(saved) :].splitlines():
                logger.warning(
                    "%s: %d lines after step %d are cut; those steps are taken again", path, len(lines), step
                )
            if current != saved:
                atomic_write(path, saved)
            cut_events(self.paths.events, step)
            for file in self.paths.rollouts.glob("*.jsonl"):
                if (match := ROLLOUT_NAME.fullmatch(file.name)) and int(match[2]) > step:
                    file.unlink()

    def _check(self) -> None:
        paths = self.paths
        with self.writing("the folder"):  # its name may be too long, or a parent unreadable
            ancestors = (paths.root, *paths.root.parents)
            files = [path for path in ancestors if path.exists() and not path.is_dir()]
        if files:
            raise ConfigError(
                f"run.dir = '{paths.root}': there is a file at '{files[0]}'; name a folder that can be made"
            )
        refuse_inputs(paths.root, self._inputs)
        mark = self._lock.mark if self._lock is not None else read_mark(paths.root)
        foreign = [name for name in self._writes if _is_foreign(paths.root / name, owned=name in mark.wrote)]
        if foreign:
            names = ", ".join(f"{name}/" if (paths.root / name).is_dir() else name for name in foreign)
            raise ConfigError(
                f"run.dir = '{paths.root}' holds {names}, which no run wrote ({RUN_MARK}): somebody else's files are "
                "neither overwritten nor removed. Move them, or name another folder with run.dir=..."
            )
        contents = _contents(paths, mark)
        if contents and not self._overwrite and not self._resume:
            raise ConfigError(
                f"run.dir = '{paths.root}' already holds a run ({', '.join(contents)}); name another folder with"
                " run.dir=..., continue this run with --resume (resume=True), or replace it with run.overwrite=true"
            )


def _is_foreign(path: Path, *, owned: bool) -> bool:
    """Return True if a file or folder that no run wrote is at `path`; `owned` if runs write this name."""
    if not owned:
        return _exists(path)
    # A reader would wait for a pipe, and a write would go through a link.
    is_file = path.is_file() and not path.is_symlink()
    is_right_kind = path.is_dir() if path.name in (*FOLDERS, *OPTIONAL_FOLDERS) else is_file
    return os.path.lexists(path) and not is_right_kind


def _exists(path: Path) -> bool:
    """Return True if a file, a link or a folder that is not empty is at `path`."""
    return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))


def _contents(paths: RunPaths, mark: RunMark) -> list[str]:
    """Describe the results of a run; [] if the folder is new or its run made no step."""
    rows = paths.metrics.read_bytes().count(b"\n") if paths.metrics.is_file() else 0
    contents = {"metrics.jsonl": f"{rows} rows in metrics.jsonl"} if rows else {}
    contents |= {name: name for name in ("summary.json", *OPTIONAL_FOLDERS) if _exists(paths.root / name)}
    return [text for name, text in contents.items() if name in mark.wrote]


def _remove_run(paths: RunPaths, mark: RunMark) -> None:
    """Remove the files that runs wrote by the `mark`, and folders that are then empty."""
    for path in _run_files(paths, mark):
        remove(path)
    for name in (*FOLDERS, *OPTIONAL_FOLDERS):
        top = paths.root / name
        for path in sorted([top, *top.rglob("*")], reverse=True):  # contents before their folder
            if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                path.rmdir()


def _temporary_files(paths: RunPaths) -> list[Path]:
    """Return files that a killed process had not renamed yet (`atomic_write`)."""
    names = "|".join([*map(re.escape, FILES), ROLLOUT_NAME.pattern, IMAGE_NAME.pattern])
    folders = (paths.root, paths.rollouts, paths.images)
    files = (file for folder in folders for file in folder.glob(".*.tmp"))
    return [file for file in files if re.fullmatch(rf"\.({names})\.\d+\.tmp", file.name)]


def _run_files(paths: RunPaths, mark: RunMark) -> Iterator[Path]:
    """Yield the files and checkpoints that runs wrote by the `mark`."""
    outputs: dict[str, Iterable[Path]] = {
        **{name: [paths.root / name] for name in FILES},
        "rollouts": (
            *(path for path in paths.rollouts.glob("*.jsonl") if ROLLOUT_NAME.fullmatch(path.name)),
            *(path for path in paths.images.glob("*.*") if IMAGE_NAME.fullmatch(path.name)),
        ),
        "checkpoints": (
            *(path for path in paths.checkpoints.glob("step-*") if STEP_NAME.fullmatch(path.name)),
            *left_in(paths.checkpoints),
        ),
        "tensorboard": paths.tensorboard.glob("events.out.tfevents.*"),
        "model": _files_in(paths.model, mark),
        "adapter": _files_in(paths.adapter, mark),
    }
    for name, paths_of_name in outputs.items():
        if name in mark.wrote:
            yield from paths_of_name


def _files_in(folder: Path, mark: RunMark, *, owned: bool = True) -> list[Path]:
    """Return the files in `model` or `adapter` that runs wrote, or with `owned=False` all others."""
    if folder.is_symlink():
        return [folder] if owned else []
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in files if (f"{folder.name}/{path.relative_to(folder)}" in mark.wrote) is owned]
