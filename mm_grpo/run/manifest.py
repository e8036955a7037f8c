"""manifest.json: what a checkpoint is of, a mark for each of its files, and the digest of the manifest itself.

Here is what reads a checkpoint without a learner; checkpoint.py writes one, and puts a learner into its state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.errors import ConfigError
from mm_grpo.files import read_json
from mm_grpo.learner.state import has_mark
from mm_grpo.run.paths import STEP_NAME

FORMAT = 3
"""3 marks files and frozen weights with XXH3, 2 with SHA-256; 1 had neither the manifest's digest nor the log."""
READ = (2, 3)
MANIFEST = "manifest.json"
REFERENCE = "reference.safetensors"
LOG = "metrics.jsonl"
KEYS: Mapping[str, type | tuple[type, ...]] = {
    "format": int, "step": int, "extra": dict, "reference": (dict, type(None)), "config": dict, "parameters": dict,
    "frozen": str, "updates": int, "adam_steps": int, "files": list, "log": (dict, type(None)), "sha256": str,
}  # fmt: skip
"""What a manifest holds, all of it required; no number is below 0."""
EXTRA_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "tokens_seen": int, "rows": dict, "rewards": list, "best": (dict, type(None)), "before": dict, "after": dict,
}  # fmt: skip
"""What the trainer keeps in a manifest's extra; same_run.py requires all of it."""


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


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest without its own digest, whatever the order and the layout of its keys."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def manifest_fault(manifest: Any, step: int) -> str | None:
    """What is wrong with what manifest.json of the checkpoint of `step` holds; it follows the folder's name."""
    if not isinstance(manifest, dict) or "format" not in manifest:
        return f"/{MANIFEST} is no manifest"
    if manifest["format"] not in READ:
        return f" has format {manifest['format']}, and this version reads {' and '.join(map(str, READ))}"
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


def file_fault(path: Path, wanted: Mapping[str, Any]) -> str | None:
    """What is wrong with a file of the checkpoint in `path`, by its mark in the manifest."""
    file = path / wanted["name"]
    if not file.is_file():
        return f"{path.name} lacks {file.name}"
    if (size := file.stat().st_size) != wanted["bytes"]:
        return f"{path.name}/{file.name} has {size} bytes and was written with {wanted['bytes']}: it is truncated"
    if not has_mark(file, wanted):
        return f"{path.name}/{file.name} is not what was written: its digest differs"
    return None


def read_checkpoint(path: Path, *, files: bool = True) -> Checkpoint:
    """The checkpoint in `path`, without a learner; with `files` they are as they were written. ConfigError else."""
    try:
        manifest = read_json(path / MANIFEST)
        fault = manifest_fault(manifest, step_of(path))
        fault = fault and f"{path.name}{fault}"
        kept = [*manifest["files"], manifest["reference"], manifest["log"]] if files and not fault else []
        for wanted in kept:
            fault = fault or (file_fault(path, wanted) if wanted is not None else None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"{path.name}/{MANIFEST} cannot be read ({error})"
    if fault:
        raise ConfigError(f"'{path}': {fault}; take another checkpoint")
    return Checkpoint(path, manifest)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run's folder `checkpoints`, by step in order, whole or not."""
    found = [p for p in folder.glob("step-*") if p.is_dir() and STEP_NAME.fullmatch(p.name)]
    return {step_of(path): path for path in sorted(found, key=step_of)}


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(path.name.removeprefix("step-"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
