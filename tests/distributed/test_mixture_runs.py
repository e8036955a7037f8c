"""Whole runs on a mixture: the same on 1 and 2 processes, and the same when they are killed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_folders import (
    SHAPES,
    assert_the_same_run,
    assert_the_same_sight,
    metrics_of,
    rollouts_of,
    weights_of,
    write_config,
)
from killed import kill_until_done


def entry(kind: str, split: str, size: int, seed: int, **more: Any) -> dict[str, Any]:
    task = {**SHAPES, "kinds": [kind], "max_objects": 2, "split": split, "size": size, "seed": seed}
    return {"path": task, "task": kind, **more}


DATA = {
    "train": [entry("colour", "train", 7, 1, weight=2), entry("count", "train", 30, 2)],
    "eval": [entry("colour", "heldout", 3, 3), entry("count", "heldout", 2, 4)],
}
REWARDS: list[dict[str, Any]] = [
    {"name": "length", "max_length": 4, "when": {"task": "colour"}},
    {"name": "length", "as": "brief", "max_length": 2, "when": {"task": "count"}},
]


def written(model: Path, folder: Path, **run: Any) -> Path:
    rollout = {"prompts_per_step": 6, "num_generations": 4, "max_completion_length": 6}
    return write_config(
        model, folder, data=DATA, rewards=REWARDS, rollout=rollout, run={"dir": str(folder), **run}
    )


@pytest.mark.long
def test_one_and_two_processes_make_the_same_run(models: dict[str, Path], tmp_path: Path) -> None:
    for world in (1, 2):
        kill_until_done(
            written(models["qwen2_5_vl"], tmp_path / f"of-{world}", max_steps=6), world, 0, seed=1
        )
    one, two = tmp_path / "of-1", tmp_path / "of-2"
    rows = [
        [json.loads(x) for x in "".join(rollouts_of(folder).values()).splitlines()] for folder in (one, two)
    ]
    given = [[row.pop("advantage") for row in of_run] for of_run in rows]
    for row, expected in zip(*rows, strict=True):
        assert_the_same_sight(row, expected)
    assert rows[0] == rows[1] and given[0] == pytest.approx(given[1], abs=1e-5) and any(given[0])
    for step in range(1, 7):
        uids = {(row["slot"], row["uid"]) for row in rows[0] if row["step"] == step}
        assert Counter(uid.partition(":")[0] for _, uid in uids) == {"train/shapes": 4, "train/shapes-2": 2}
    for mine, theirs in zip(metrics_of(one), metrics_of(two), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            if key.startswith(("task/", "rewards/", "epoch", "eval/")):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key
    assert_the_same_run(two, one, 6)


@pytest.mark.long
def test_a_killed_run_is_the_run_that_was_not(models: dict[str, Path], tmp_path: Path) -> None:
    run = {"max_steps": 14, "save_every": 3, "eval_every": 5}
    for name, count in (("straight", 0), ("killed", 1)):
        log = kill_until_done(written(models["qwen2_5_vl"], tmp_path / name, **run), 2, count, seed=2)
        assert len(log) == count and all(entry["ended"] is None for entry in log), log
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == 15
    assert rollouts_of(killed) == rollouts_of(straight)
    want = weights_of(straight)
    assert all(torch.equal(weight, want[name]) for name, weight in weights_of(killed).items())
