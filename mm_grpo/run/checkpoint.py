"""checkpoints/step-000010/: everything that a killed run needs to go on.

A checkpoint is a folder with one `state-RANK-of-WORLD.safetensors` per process (see learner/state.py), the
weights of the reference policy where it moves during the run (`reference.safetensors`), the log up to its step
(`metrics.jsonl`), and `manifest.json`, which says what the checkpoint is of and marks each file with its size and
SHA-256, and itself with the SHA-256 of what else it holds. It is filled beside, under a name that starts with a dot,
and renamed when all of it is on the disk: a folder with the right name is whole, or was damaged later, which the
marks tell.

Any number of processes may resume it. The files have to lie where every process sees them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mm_grpo.config import GRPOConfig
from mm_grpo.config.messages import Section, section_of
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write, read_regular_file
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.optimizer import trainable
from mm_grpo.learner.state import (
    FileMark,
    frozen_digest,
    load_reference,
    load_state,
    mark_of,
    save_reference,
    save_state,
)
from mm_grpo.run.paths import STEP_NAME, RunPaths

FORMAT = 2
"""2 has the digest of the manifest and the log; a checkpoint of format 1 is not resumed."""
MANIFEST = "manifest.json"
REFERENCE = "reference.safetensors"
LOG = "metrics.jsonl"
MOST_STEPS = 100
"""Steps that a killed run redoes at most, where run.save_every is null."""
KEYS: Mapping[str, type | tuple[type, ...]] = {
    "format": int, "step": int, "extra": dict, "reference": (dict, type(None)), "config": dict, "parameters": dict,
    "frozen": str, "updates": int, "adam_steps": int, "files": list, "log": (dict, type(None)), "sha256": str,
}  # fmt: skip
"""What a manifest holds, all of it required; no number is below 0."""
EXTRA_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "tokens_seen": int, "rows": dict, "rewards": list, "best": (dict, type(None)), "before": dict, "after": dict,
}  # fmt: skip
"""What the trainer keeps in a manifest's extra; same_run.py requires all of it."""
logger = logging.getLogger("mm_grpo")

# Fields that may differ on resuming: none of them changes a sample or an update.
NEUTRAL = (
    "model.device",
    "rollout.eval.",
    "optim.max_tokens_per_pack",
    "optim.gradient_checkpointing",
    "optim.zero_stage",
    "optim.offload_optimizer",
    "run.",
)
NOT_NEUTRAL = ("run.seed",)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read and whose files are as they were written."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the trainer asked to keep: tokens seen, best score."""
        extra: Mapping[str, Any] = self.manifest["extra"]
        return extra

    @property
    def log(self) -> bytes | None:
        """metrics.jsonl as it was; None when there was none."""
        return (self.path / LOG).read_bytes() if self.manifest["log"] is not None else None


class Checkpoints:
    """The checkpoints of one run, written and read by all processes of `learner.ranks` together."""

    def __init__(self, paths: RunPaths, learner: Learner, config: GRPOConfig) -> None:
        self.folder, self.log, self.learner, self.config = paths.checkpoints, paths.metrics, learner, config
        self.ranks = learner.ranks

    def save(self, step: int, extra: Mapping[str, Any], *, spared: int | None = None) -> Path:
        """Write the checkpoint of `step` and remove those that are older than `run.keep_checkpoints` allows.

        That of the step `spared`, if there is one, stays however old it is. Those of later steps go too: the run
        went on from before them, so they were damaged. Raises ConfigError when the checkpoint
        cannot be written; what was there before is then untouched.
        """
        identity = self._identity  # every process takes part in it
        path = self.folder / f"step-{step:06d}"
        beside = self.folder / f".{path.name}.new"
        try:
            with self.ranks.fail_together("a checkpoint"):
                if self.ranks.first:
                    self._make_room(beside)
            with self.ranks.fail_together("a checkpoint"):
                mark = self._write_share(beside)
                reference = self._write_reference(beside)
            marks = self.ranks.all_gather(mark, "a checkpoint")
            with self.ranks.fail_together("a checkpoint"):
                if self.ranks.first:
                    contents = {"step": step, "extra": dict(extra), "reference": reference, **identity}
                    self._finish(beside, path, contents, marks)
                    self._remove_old(step, spared)
        except BaseException:
            if self.ranks.first:
                shutil.rmtree(beside, ignore_errors=True)
            raise
        return path

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None when there is none at all.

        Damaged ones are passed over with a warning. Raises ConfigError when all are damaged.
        """
        faults: list[str] = []
        for path in reversed(self._listed()):
            manifest, fault = self._inspected(path)
            if fault is None:
                for each in faults:
                    logger.warning("%s; resuming from %s", each, path.name)
                return Checkpoint(path, manifest)
            faults.append(fault)
        if faults:
            raise ConfigError(
                f"no checkpoint in '{self.folder}' is whole: {'; '.join(faults)}; put back what was changed, or start "
                "again with run.overwrite=true"
            )
        return None

    def load(self, checkpoint: Checkpoint) -> None:
        """Put the learner into the state of a checkpoint. ConfigError when it is another run's or model's."""
        manifest, identity = checkpoint.manifest, self._identity
        with self.ranks.fail_together("resuming"):
            self._refuse_others(checkpoint, identity)
            files = [checkpoint.path / str(mark["name"]) for mark in manifest["files"]]
            own = files[self.ranks.rank] if len(files) == self.ranks.world else None
            try:
                load_state(self.learner.optimizer, files, manifest["updates"], manifest["adam_steps"], own)
                if manifest["reference"] is not None and self.learner.moving is not None:
                    load_reference(self.learner.moving, checkpoint.path / REFERENCE)
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
                raise ConfigError(
                    f"the checkpoint '{checkpoint.path}' cannot be loaded ({type(error).__name__}: {error}): its marks "
                    "agree with files that are no state; remove it, or start again with run.overwrite=true"
                ) from error

    def sentence(self, every: int) -> str:
        """What the run keeps to resume from, said at its start, with the bytes on disk of one checkpoint."""
        if not every:
            return "no checkpoints (run.save_every is 0): a run that is killed starts again"
        size = 12 * sum(
            p.numel() for p in trainable(self.learner.module).values()
        )  # weights and two means, fp32
        keep = self.config.run.keep_checkpoints
        return (
            f"a checkpoint of {size / 1e9:.3g} GB every {every} step{'s' * (every > 1)} (run.save_every), the newest "
            f"{keep} kept; a run that is killed or stopped goes on with --resume"
        )

    # writing ---------------------------------------------------------------------------------

    def _make_room(self, beside: Path) -> None:
        try:
            for left in self.folder.glob(".step-*.new"):  # by a process that was killed
                _remove(left)
            beside.mkdir(parents=True)
        except OSError as error:
            raise self._unwritten(error) from error

    def _write_share(self, beside: Path) -> FileMark:
        name = f"state-{self.ranks.rank:05d}-of-{self.ranks.world:05d}.safetensors"
        if not beside.is_dir():
            raise ConfigError(
                f"run.dir = '{self.folder.parent}': process {self.ranks.rank} does not see the folder that the first "
                "process made there; name one that all hosts share"
            )
        try:
            return save_state(self.learner.optimizer, beside / name)
        except OSError as error:
            raise self._unwritten(error) from error

    def _write_reference(self, beside: Path) -> dict[str, Any] | None:
        """The reference policy, where it is neither the base model nor this one without its adapters."""
        if self.learner.moving is None or not self.ranks.first:
            return None
        try:
            return save_reference(self.learner.moving, beside / REFERENCE).as_dict()
        except OSError as error:
            raise self._unwritten(error) from error

    def _finish(self, beside: Path, path: Path, contents: Mapping[str, Any], marks: list[FileMark]) -> None:
        missing = [mark.name for mark in marks if not (beside / mark.name).is_file()]
        if missing:
            raise ConfigError(
                f"run.dir = '{self.folder.parent}': {', '.join(missing)} was written by another process and is not "
                "there; name a folder that all hosts share"
            )
        manifest = {
            "format": FORMAT,
            **contents,
            "updates": self.learner.optimizer.updates,
            "adam_steps": self.learner.optimizer.adam_steps,
            "files": [mark.as_dict() for mark in marks],
            "log": None,
        }
        try:
            if self.log.is_file():
                atomic_write(beside / LOG, self.log.read_bytes())
                manifest["log"] = mark_of(beside / LOG).as_dict()
            manifest["sha256"] = digest_of(manifest)
            atomic_write(beside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
            _sync(beside)
            _remove(path)  # the step is taken again, so this one was not whole
            os.replace(beside, path)
            _sync(self.folder)
        except OSError as error:
            raise self._unwritten(error) from error

    def _remove_old(self, step: int, spared: int | None) -> None:
        listed = self._listed()
        done = [path for path in listed if _step_of(path) <= step]
        for old in [*done[: -self.config.run.keep_checkpoints], *listed[len(done) :]]:
            if _step_of(old) != spared:
                shutil.rmtree(old, ignore_errors=True)

    def _unwritten(self, error: OSError) -> ConfigError:
        listed = self._listed()
        kept = f"the last good one is {listed[-1].name}" if listed else "there is none before it"
        return ConfigError(
            f"run.dir = '{self.folder.parent}': a checkpoint cannot be written ({error.strerror or error}); {kept}. "
            "Make room, or lower run.keep_checkpoints, and resume"
        )

    # reading ---------------------------------------------------------------------------------

    def _listed(self) -> list[Path]:
        found = [p for p in self.folder.glob("step-*") if p.is_dir() and STEP_NAME.fullmatch(p.name)]
        return sorted(found, key=_step_of)

    def _inspected(self, path: Path) -> tuple[dict[str, Any], str | None]:
        """A manifest, and what is wrong with the checkpoint; every process looks at its share of the files."""
        manifest: dict[str, Any] = {}
        fault: str | None = None
        try:
            manifest = json.loads(read_regular_file(path / MANIFEST).decode())
            fault = manifest_fault(manifest, _step_of(path))
            fault = fault and f"{path.name}{fault}"
            kept = [] if fault else [*manifest["files"], manifest["reference"], manifest["log"]]
            for wanted in self.ranks.shard([mark for mark in kept if mark is not None]):
                file = path / wanted["name"]
                if fault is None and not file.is_file():
                    fault = f"{path.name} lacks {file.name}"
                if fault is None and file.stat().st_size != wanted["bytes"]:
                    fault = (
                        f"{path.name}/{file.name} has {file.stat().st_size} bytes and was written with "
                        f"{wanted['bytes']}: it is truncated"
                    )
                if fault is None and mark_of(file).sha256 != wanted["sha256"]:
                    fault = f"{path.name}/{file.name} is not what was written: its SHA-256 differs"
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            fault = f"{path.name}/{MANIFEST} cannot be read ({error})"
        faults = [f for f in self.ranks.all_gather(fault, "looking for a checkpoint") if f]
        return manifest, faults[0] if faults else None

    def _refuse_others(self, checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
        manifest, where = checkpoint.manifest, f"'{checkpoint.path}'"
        config, then = identity["config"], manifest["config"]
        # a field that the version of the checkpoint did not have is as it was then when it has its default
        default = deciding_fields(GRPOConfig.from_dict({"model": {"path": self.config.model.path}}))
        for field in [*config, *(then.keys() - config.keys())]:
            value, known = config.get(field), then.get(field, default.get(field))
            if known != value:
                raise ConfigError(
                    f"{field} = {json.dumps(value)}: the checkpoint {where} was made with {json.dumps(known)}, and "
                    "what follows would be another run; put it back, or start a new run"
                )
        mine, theirs = identity["parameters"], manifest["parameters"]
        differing = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        if differing:
            name = differing[0]
            raise ConfigError(
                f"model.path = '{self.config.model.path}': the checkpoint {where} is of another model: {name} has "
                f"shape {theirs.get(name, 'none')} there and {mine.get(name, 'none')} here "
                f"({len(differing)} of {len(mine)} trained tensors differ)"
            )
        if manifest["frozen"] != identity["frozen"]:
            raise ConfigError(
                f"model.path = '{self.config.model.path}': the weights that are not trained differ from those that "
                f"the checkpoint {where} was trained with; give the same base model"
            )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What a checkpoint is of. Only the first process looks at the frozen weights, and tells the others."""
        parameters = {n: list(p.shape) for n, p in trainable(self.learner.module).items()}
        frozen = frozen_digest(self.learner.model) if self.ranks.first else ""
        return {
            "config": deciding_fields(self.config),
            "parameters": parameters,
            "frozen": self.ranks.broadcast(frozen, "frozen weights"),
        }


def steps_between(save_every: int | None, max_steps: int) -> int:
    """Steps from one checkpoint to the next, 0 for none: what run.save_every says, or what null stands for."""
    return max(1, min(MOST_STEPS, max_steps // 10)) if save_every is None else save_every


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest without its own digest, whatever the order and the layout of its keys."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def manifest_fault(manifest: Any, step: int) -> str | None:
    """What is wrong with what manifest.json of the checkpoint of `step` holds; it follows the folder's name."""
    if not isinstance(manifest, dict) or "format" not in manifest:
        return f"/{MANIFEST} is no manifest"
    if manifest["format"] != FORMAT:
        return f" has format {manifest['format']}, and this version reads {FORMAT}"
    if wrong := sorted({*manifest} ^ {*KEYS}):
        return f"/{MANIFEST} lacks or should not have {', '.join(map(repr, wrong))}"
    if manifest["sha256"] != digest_of(manifest):
        return f"/{MANIFEST} is not what was written: its SHA-256 differs"
    known = {f"extra.{key}": value for key, value in _mapping(manifest["extra"]).items() if key in EXTRA_KEYS}
    kinds = {**KEYS, **{f"extra.{key}": kind for key, kind in EXTRA_KEYS.items()}}
    for key, value in ({**manifest, **known}).items():
        below = isinstance(value, int) and value < 0
        if (
            below
            or isinstance(value, bool)
            or not isinstance(value, kinds[key])
            or (key == "files" and not value)
        ):
            return f"/{MANIFEST} has {key} = {value!r}, which is none"
    if manifest["step"] != step:
        return f" is the checkpoint of step {manifest['step']}: the folder was renamed"
    return None


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def deciding_fields(config: GRPOConfig) -> dict[str, Any]:
    """The fields that decide what a run computes, flat, as JSON holds them."""
    flat: dict[str, Any] = {}

    def walk(section: Section, dumped: Mapping[str, Any], before: str) -> None:
        for name, value in dumped.items():
            path = before + name
            if section_of(type(section).model_fields[name]):
                walk(getattr(section, name), value, f"{path}.")
            elif path in NOT_NEUTRAL or not any(
                path == n or (n[-1] == "." and path.startswith(n)) for n in NEUTRAL
            ):  # a mapping whole, and a section that may be null: what is left out of it is a difference too
                flat[path] = json.loads(json.dumps(value, default=str))

    walk(config, config.model_dump(), "")
    flat["optim.learning_rate"] = config.learning_rate  # what null stands for
    if config.optim.lr_scheduler_type != "constant":  # the rate of every step goes by the length of the run
        flat["run.max_steps"] = config.run.max_steps
    return flat


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


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
