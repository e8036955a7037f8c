"""Runs of a tiny model on six rows, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.configs import merged, small_config
from mm_grpo import GRPOConfig
from mm_grpo.data.shapes import shapes_rows

ROWS = shapes_rows(split="train", size=6, seed=1, image_size=56)
HELDOUT = shapes_rows(split="heldout", size=3, seed=2, image_size=56)
TURNS = {
    "rollout": {"max_completion_length": 200, "max_turns": 3, "environment_workers": 0},
    "run": {"max_steps": 2},
}


def config_for(path: Any, folder: Path | None = None, **changes: Any) -> GRPOConfig:
    return small_config(path, folder, **merged({"run": {"seed": 5}}, changes))


def vowels(completion: str) -> float:
    return sum(c in "aeiou" for c in completion) + len(completion) / 100


def rows_on_disk(folder: Path, rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    """The rows with their pictures as files in a new folder."""
    folder.mkdir()
    for n, row in enumerate(rows):
        row["images"][0].save(folder / f"{n}.png")
    return [row | {"images": [str(folder / f"{n}.png")]} for n, row in enumerate(rows)]


def names(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts_of(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()]
