"""Configs of small runs on rendered shapes, and what a run's folder holds, for the tests of whole runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.configs import merged, small_config
from mm_grpo import GRPOConfig

SHAPES = {"task": "shapes", "image_size": 56, "kinds": ["colour", "shape"], "max_objects": 1}
RUN: Mapping[str, Any] = {
    "data": {
        "train": {**SHAPES, "split": "train", "size": 40, "seed": 1},
        "eval": {**SHAPES, "split": "heldout", "size": 5, "seed": 2},
    },
    "rollout": {"prompts_per_step": 5, "num_generations": 4},
    "rewards": [{"name": "length", "max_length": 4}],  # a tiny random model names no colour: length moves it
    "optim": {"adam_epsilon": 1e-4, "updates_per_step": 2},
    "run": {"max_steps": 5, "eval_every": 2, "report": False},
}


def write_config(path: Path, folder: Path, /, **changes: Any) -> Path:
    """A config beside `folder`, where its run goes, with `changes` laid over RUN."""
    file = folder.with_suffix(".yaml")
    small_config(path, folder, **merged(RUN, changes)).save(file)
    return file


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of the log without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "step_time"} for r in rows]


def rollouts_of(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted((folder / "rollouts").glob("step-*.jsonl"))}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_the_same_run(folder: Path, other: Path, steps: int, *, weights: float = 1e-3) -> None:
    """The completions, rewards and seeds of `folder` are those of `other`; losses and weights agree. `weights` bounds
    the distance of a weight from the other run's, as a share of how far that run moved it."""
    mine, theirs = ("".join(rollouts_of(f).values()).splitlines() for f in (folder, other))
    rows = [json.loads(line) for line in mine]
    assert len(rollouts_of(folder)) == steps and len({row["completion"] for row in rows}) > steps
    for row, expected in zip(rows, map(json.loads, theirs), strict=True):
        assert_the_same_sight(row, expected)
        assert row == expected
    for row, expected in zip(metrics_of(folder), metrics_of(other), strict=True):
        assert row.keys() == expected.keys()
        if row["step"] == 0:  # the evaluation before the first step
            continue
        for key in ("loss", "grad_norm", "learner/update_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-4), key
        for key in ("reward", "num_tokens"):
            assert row[key] == expected[key], key
    base = load_file(Path(GRPOConfig.from_yaml(folder / "config.yaml").model.path) / "model.safetensors")
    found = weights_of(folder)
    for name, expected_weight in weights_of(other).items():
        moved = (expected_weight - base[name]).norm().clamp(min=1e-12)
        assert (found[name] - expected_weight).norm() / moved <= weights, name


def assert_the_same_sight(row: dict[str, Any], expected: dict[str, Any]) -> None:
    """`sight` and `order` of two rows of rollouts agree, and are taken out: they are differences of log-probs."""
    for name in ("sight", "order"):
        mine, theirs = row.pop(name, None), expected.pop(name, None)
        if mine is None or theirs is None:
            assert mine == theirs
            continue
        tokens = mine.pop("tokens"), theirs.pop("tokens")
        assert mine.pop("nats") == pytest.approx(theirs.pop("nats"), abs=1e-3)
        assert tokens[0] == pytest.approx(tokens[1], abs=1e-3) and mine == theirs
