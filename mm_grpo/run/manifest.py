"""manifest.json of a checkpoint: its origin, size and XXH3 of each file, and the manifest's own XXH3 at the end.

This module reads checkpoints without a learner; checkpoint.py writes them and restores a learner.
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
from mm_grpo.learner.state import mark_of
from mm_grpo.run.paths import STEP_NAME

FORMAT = 5
MANIFEST = "manifest.json"
DIGEST = "xxh3_128"
"""Last key of a manifest: the digest of all other keys."""
LOG = "metrics.jsonl"
FileEntry = Mapping[str, Any]
"""A `learner.state.FileMark` in the manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """Intact checkpoint."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def extra(self) -> Mapping[str, Any]:
        """Values that the trainer saved: tokens seen, best score."""
        extra: Mapping[str, Any] = self.manifest["extra"]
        return extra

    @property
    def log(self) -> bytes | None:
        """metrics.jsonl at that step; None if there was none."""
        return (self.path / LOG).read_bytes() if self.manifest["log"] is not None else None


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return the text of manifest.json with a new DIGEST."""
    values = {name: value for name, value in manifest.items() if name != DIGEST}
    digest = xxhash.xxh3_128(json.dumps(values, indent=1).encode()).hexdigest()
    return json.dumps(values | {DIGEST: digest}, indent=1) + "\n"


def inspect_checkpoint(
    path: Path, share: Callable[[list[FileEntry]], Sequence[FileEntry]] = lambda entries: entries
) -> tuple[dict[str, Any], str | None]:
    """Return the manifest of the checkpoint in `path`, and its fault; None if it is intact.

    Only the files that `share` selects are compared with the manifest.
    """
    manifest: dict[str, Any] = {}
    try:
        data = read_regular_file(path / MANIFEST, LARGEST_JSON)
        manifest = parse_json(data, dict)
        if (version := manifest["format"]) != FORMAT:
            return manifest, f"{path.name} has format {shown(version)}, and this version reads {FORMAT}"
        # compare bytes: a manifest with equal values may still have been edited
        if data != manifest_text(manifest).encode():
            return manifest, f"{path.name}/{MANIFEST} is not what was written"
        if (step := manifest["step"]) != step_of(path):
            return manifest, f"{path.name} is the checkpoint of step {step}: the folder was renamed"
        entries = [*manifest["files"], manifest["log"]]
        for entry in share([entry for entry in entries if entry is not None]):
            file = path / entry["name"]
            # the size first: the digest of an endless file would never end
            if not (file.is_file() and file.stat().st_size == entry["bytes"] and mark_of(file) == entry):
                return manifest, f"{path.name}/{file.name} is missing, or not what was written"
    except (OSError, ValueError, KeyError) as error:
        return manifest, f"{path.name}/{MANIFEST} cannot be read ({error})"
    return manifest, None


def read_checkpoint(path: Path, *, files: bool = True) -> Checkpoint:
    """Read the checkpoint in `path` without a learner. Raises ConfigError if it, or with `files` a file, is damaged."""
    manifest, fault = inspect_checkpoint(path) if files else inspect_checkpoint(path, lambda entries: [])
    if fault:
        raise ConfigError(f"'{path}': {fault}; take another checkpoint")
    return Checkpoint(path, manifest)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return step -> checkpoint of a run's folder `checkpoints`, in order, intact or not."""
    paths = [p for p in folder.glob("step-*") if p.is_dir() and STEP_NAME.fullmatch(p.name)]
    return {step_of(path): path for path in sorted(paths, key=step_of)}


def step_of(path: Path) -> int:
    """Return the step of a checkpoint by its folder's name."""
    return int(path.name.removeprefix("step-"))
