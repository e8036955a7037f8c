"""The run folder as the trainer uses it: prepared before a model loads, started, then written to.

The names are in paths.py; each file has a module of its own (see the package's docstring). A folder
that already holds a run is never written over unless the user asked for it, and then only what a
run writes is removed: notes beside it stay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from mm_grpo.errors import ConfigError
from mm_grpo.run.atomic import atomic_folder, atomic_write
from mm_grpo.run.environment import describe_environment
from mm_grpo.run.metrics import MetricsLog
from mm_grpo.run.paths import IMAGE_NAME, STEP_NAME, RunPaths
from mm_grpo.run.report import write_report
from mm_grpo.run.rollout_log import write_rollouts
from mm_grpo.run.summary import write_summary
from mm_grpo.types import Group

AnyPath = str | PathLike[str]


class RunFolder:
    """One run's folder. `prepare` then `start` make a new one, `create` does both, `open` finds one.

    `overwrite` allows `start` to replace the run that is there. `reads` are paths that the new run
    reads (its base model, its data): one that lies in what would be removed is refused.
    """

    def __init__(
        self,
        dir: AnyPath,
        *,
        overwrite: bool = False,
        reads: Iterable[AnyPath] = (),
        resume: bool = False,
    ) -> None:
        self.paths = RunPaths(Path(dir))
        self._overwrite = overwrite
        self._resume = resume
        self._reads = tuple(reads)

    @classmethod
    def prepare(
        cls,
        dir: AnyPath,
        *,
        overwrite: bool = False,
        reads: Iterable[AnyPath] = (),
        resume: bool = False,
    ) -> RunFolder:
        """Check that a run may start in `dir`, or with `resume` go on there; writes nothing.

        Raises ConfigError when a run is there and `overwrite` is false, when overwriting would
        remove one of `reads`, or when there is a file at `dir`.
        """
        folder = cls(dir, overwrite=overwrite, reads=reads, resume=resume)
        folder._check()
        return folder

    @classmethod
    def create(cls, dir: AnyPath, config_yaml: str, overwrite: bool = False) -> RunFolder:
        """Prepare and start a run in `dir`."""
        return cls.prepare(dir, overwrite=overwrite).start(config_yaml)

    @classmethod
    def open(cls, dir: AnyPath) -> RunFolder:
        """The run in `dir`; ConfigError when there is none."""
        folder = cls(dir)
        if not folder.paths.config.is_file():
            raise ConfigError(
                f"'{dir}' is no run folder: it has no config.yaml; name the run.dir of a run that was started"
            )
        return folder

    def start(self, config_yaml: str, *, rewards: Sequence[Mapping[str, Any]] = ()) -> RunFolder:
        """Write config.yaml and environment.json, after removing the run that may be replaced.

        `rewards` say which function each reward is; they are kept in environment.json. Raises
        ConfigError as `prepare` does, and when the folder cannot be written.
        """
        self._check()
        paths = self.paths
        environment = describe_environment() | {"rewards": [dict(reward) for reward in rewards]}
        try:
            if held(paths) and not self._resume:
                remove_run(paths)
            paths.root.mkdir(parents=True, exist_ok=True)
            atomic_write(paths.config, config_yaml)
            atomic_write(paths.environment, json.dumps(environment, indent=2) + "\n")
        except PermissionError as error:
            raise ConfigError(
                f"run.dir = '{paths.root}': '{error.filename}' may not be written; name a folder that may"
            ) from error
        except OSError as error:  # a read-only or a full disk, a folder that cannot be made there
            raise ConfigError(
                f"run.dir = '{paths.root}': cannot be written ({error.strerror or error}); name a folder that can"
            ) from error
        return self

    @cached_property
    def metrics(self) -> MetricsLog:
        """metrics.jsonl, open for appending."""
        return MetricsLog(self.paths.metrics)

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        parts: Mapping[str, Sequence[float | None]],
        extra: Mapping[str, Sequence[Any]] | None = None,
    ) -> Path:
        """See `rollout_log.write_rollouts`."""
        return write_rollouts(self.paths, step, groups, parts, extra)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """See `summary.write_summary`."""
        write_summary(self.paths, summary)

    def write_report(self) -> Path:
        """See `report.write_report`."""
        return write_report(self.paths)

    def replace_folder(self, name: str, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a folder, such as "model", which then takes the place of the old one."""
        path = self.paths.root / name
        atomic_folder(path, write)
        return path

    def cut_after(self, step: int) -> None:
        """Forget what was logged after `step`: rows of metrics.jsonl, and rollout files.

        A run that resumes from the checkpoint of `step` takes those steps again. The images stay:
        they are named by their content.
        """
        self.__dict__.pop("metrics", None)
        if self.paths.metrics.is_file():
            lines = self.paths.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            atomic_write(self.paths.metrics, "".join(kept))
        for file in self.paths.rollouts.glob("step-*.jsonl"):
            match = STEP_NAME.fullmatch(file.stem)
            if match and int(match[1]) > step:
                file.unlink()

    def _check(self) -> None:
        paths = self.paths
        for place in (paths.root, *paths.root.parents):
            try:
                taken = place.exists() and not place.is_dir()
            except OSError as error:  # a name that is too long, a folder that may not be looked into
                raise ConfigError(
                    f"run.dir = '{paths.root}': cannot be made ({error.strerror or error}); name a folder that can"
                ) from error
            if taken:
                raise ConfigError(
                    f"run.dir = '{paths.root}': there is a file at '{place}'; name a folder that can be made"
                )
        found = held(paths)
        if self._resume:
            return
        if found and not self._overwrite:
            raise ConfigError(
                f"run.dir = '{paths.root}' already holds a run ({', '.join(found)}); name another folder with"
                " run.dir=..., go on with this run with --resume, or replace it with run.overwrite=true"
            )
        removed = [f.resolve() for f in (paths.model, paths.checkpoints, paths.rollouts)] if found else []
        for read in self._reads:
            if any(Path(read).resolve().is_relative_to(f) for f in removed):
                raise ConfigError(
                    f"run.overwrite = true would remove '{read}', which this run reads;"
                    f" name another folder than run.dir = '{paths.root}'"
                )


def held(paths: RunPaths) -> list[str]:
    """What of a run is there, in words; empty when the folder is new, or its run never took a step."""
    found = []
    if paths.metrics.is_file() and (rows := paths.metrics.read_bytes().count(b"\n")):
        found.append(f"{rows} row{'s' if rows > 1 else ''} in metrics.jsonl")
    if paths.summary.is_file():
        found.append("summary.json")
    if paths.config.is_file():  # without one, a model/ is somebody else's
        found += [f"{f.name}/" for f in (paths.checkpoints, paths.model) if f.is_dir() and any(f.iterdir())]
    return found


def remove_run(paths: RunPaths) -> None:
    """Remove what a run writes and nothing else; folders only once they are empty."""
    for file in (paths.config, paths.environment, paths.metrics, paths.summary, paths.report):
        file.unlink(missing_ok=True)
    _remove(f for f in paths.rollouts.glob("step-*.jsonl") if STEP_NAME.fullmatch(f.stem))
    _remove(f for f in paths.images.glob("*.png") if IMAGE_NAME.fullmatch(f.name))
    _remove(f for f in paths.checkpoints.glob("step-*") if STEP_NAME.fullmatch(f.name))
    _remove(paths.checkpoints.glob(".step-*.new"))
    _remove(paths.tensorboard.glob("events.out.tfevents.*"))
    _remove([paths.model])
    for left in (paths.images, paths.rollouts, paths.checkpoints, paths.tensorboard):
        if left.is_dir() and not any(left.iterdir()):
            left.rmdir()


def _remove(found: Iterable[Path]) -> None:
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
