"""Whole runs of several turns: the same on 1 and 2 processes, and the same when they are killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import calling
from helpers.run_folders import assert_the_same_run, metrics_of, rollouts_of, weights_of, write_config
from killed import kill_until_done

ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 3, "num_generations": 3, "max_completion_length": 150, "max_turns": 3,
    "environment": f"{calling.__file__}:Gallery",
}  # fmt: skip


def written(model: Path, folder: Path, **run: Any) -> Path:
    return write_config(
        model,
        folder,
        model={"processor": f"{calling.__file__}:Calling"},
        rollout=ROLLOUT,
        rewards=[{"name": "length", "max_length": 4}],
        run={"dir": str(folder), **run},
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in "".join(rollouts_of(folder).values()).splitlines()]


@pytest.mark.long
def test_one_and_two_processes_make_the_same_run(models: dict[str, Path], tmp_path: Path) -> None:
    for world in (1, 2):
        kill_until_done(
            written(models["qwen2_5_vl"], tmp_path / f"of-{world}", max_steps=4), world, 0, seed=1
        )
    one, two = (lines_of(tmp_path / f"of-{world}") for world in (1, 2))
    given = [[row.pop("advantage") for row in rows] for rows in (one, two)]
    assert one == two and given[0] == pytest.approx(given[1], abs=1e-5) and any(given[0])
    turns = [turn for row in one for turn in row["turns"]]
    assert sum(turn["role"] == "tool" for turn in turns) > 10
    assert any(turn.get("images") for turn in turns)
    seeds = [turn["seed"] for turn in turns if turn["role"] == "assistant"]
    assert len(set(seeds)) == len(seeds) > len(one)
    assert_the_same_run(tmp_path / "of-2", tmp_path / "of-1", 4)


@pytest.mark.long
def test_a_killed_run_is_the_run_that_was_not(models: dict[str, Path], tmp_path: Path) -> None:
    run = {"max_steps": 10, "save_every": 3, "eval_every": 0}
    for name, count in (("straight", 0), ("killed", 1)):
        log = kill_until_done(written(models["qwen2_5_vl"], tmp_path / name, **run), 1, count, seed=2)
        assert len(log) == count and all(entry["ended"] is None for entry in log), log
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert metrics_of(killed) == metrics_of(straight) and rollouts_of(killed) == rollouts_of(straight)
    assert max(row.get("turns/max", 0) for row in metrics_of(straight)) == 3
    want = weights_of(straight)
    assert all(torch.equal(weight, want[name]) for name, weight in weights_of(killed).items())
