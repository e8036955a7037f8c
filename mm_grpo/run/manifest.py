"""manifest.json: what a checkpoint is of, with the size and the XXH3 of each of its files, and its own XXH3 at the end.

Here is what reads a checkpoint without a learner; checkpoint.py writes one, and puts a learner into its state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mm_grpo.config.messages import shown
from mm_grpo.errors import ConfigError
from mm_grpo.files import LARGEST_JSON, parse_json, read_regular_file
from mm_grpo.learner.state import has_mark
from mm_grpo.run.paths import STEP_NAME

FORMAT = 4
MANIFEST = "manifest.json"
DIGEST = "xxh3_128"
"""The last key of a manifest: the digest of all that stands before it."""
LOG = "metrics.jsonl"
FileEntry = Mapping[str, Any]
"""A `learner.state.FileMark` as the manifest has it."""


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


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The text of manifest.json: `manifest` without a DIGEST that it has, and the DIGEST of that."""
    values = {name: value for name, value in manifest.items() if name != DIGEST}
    digest = xxhash.xxh3_128(json.dumps(values, indent=1).encode()).hexdigest()
    return json.dumps(values | {DIGEST: digest}, indent=1) + "\n"


def inspect_checkpoint(
    path: Path, share: Callable[[list[FileEntry]], Sequence[FileEntry]] = lambda marks: marks
) -> tuple[dict[str, Any], str | None]:
    """The manifest of the checkpoint in `path`, and what is wrong with the checkpoint; None where nothing is.

    Of the marks of its files those that `share` picks are compared with the files.
    """
    manifest: dict[str, Any] = {}
    try:
        data = read_regular_file(path / MANIFEST, LARGEST_JSON)
        manifest = parse_json(data, dict)
        if (version := manifest["format"]) != FORMAT:
            return manifest, f"{path.name} has format {shown(version)}, and this version reads {FORMAT}"
        if (
            data != manifest_text(manifest).encode()
        ):  # bytes, so that nothing beside the values is other either
            return manifest, f"{path.name}/{MANIFEST} is not what was written"
        if (step := manifest["step"]) != step_of(path):
            return manifest, f"{path.name} is the checkpoint of step {step}: the folder was renamed"
        marks = [*manifest["files"], manifest["log"]]
        for mark in share([mark for mark in marks if mark is not None]):
            file = path / mark["name"]
            # its size first: a digest of what has no end has none
            whole = file.is_file() and file.stat().st_size == mark["bytes"] and has_mark(file, mark)
            if not whole:
                return manifest, f"{path.name}/{file.name} is not there, or not what was written"
    except (OSError, ValueError, KeyError) as error:
        return manifest, f"{path.name}/{MANIFEST} cannot be read ({error})"
    return manifest, None


def read_checkpoint(path: Path, *, files: bool = True) -> Checkpoint:
    """The checkpoint in `path`, without a learner; with `files` they are as they were written. ConfigError else."""
    manifest, fault = inspect_checkpoint(path) if files else inspect_checkpoint(path, lambda marks: [])
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
