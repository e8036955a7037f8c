"""Whole runs of several turns: the same on 1 and 2 processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import calling
from helpers.run_folders import (
    assert_the_same_run,
    assert_the_same_sight,
    metrics_of,
    rollouts_of,
    write_config,
)
from killed import kill_until_done

ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 3, "num_generations": 3, "max_completion_length": 150, "max_turns": 3,
    "environment": f"{calling.__file__}:Gallery", "synchronous_turns": True,
}  # fmt: skip


STEPS = {"max_steps": 4, "save_every": 2}


def written(model: Path, folder: Path, **run: Any) -> Path:
    return write_config(
        model,
        folder,
        model={"processor": f"{calling.__file__}:Calling"},
        rollout=ROLLOUT,
        rewards=[{"name": "length", "max_length": 4}],
        algorithm={"turn_gamma": 0.9},
        run={"dir": str(folder), **run},
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in "".join(rollouts_of(folder).values()).splitlines()]


@pytest.mark.long
def test_one_and_two_processes_make_the_same_run(models: dict[str, Path], tmp_path: Path) -> None:
    for world in (1, 2):
        kill_until_done(written(models["qwen2_5_vl"], tmp_path / f"of-{world}", **STEPS), world, 0, seed=1)
    one, two = (lines_of(tmp_path / f"of-{world}") for world in (1, 2))
    for row, expected in zip(one, two, strict=True):
        assert_the_same_sight(row, expected)
    turns = [turn for row in one for turn in row["turns"]]
    given = [
        [x.pop("advantage") for row in rows for x in (row, *row["turns"]) if "advantage" in x]
        for rows in (one, two)
    ]
    assert one == two and given[0] == pytest.approx(given[1], abs=1e-5) and any(given[0])
    assert sum(turn["role"] == "tool" for turn in turns) > 10
    assert any(turn.get("images") for turn in turns)
    said = [turn for turn in turns if turn["role"] == "assistant"]
    seeds = [turn["seed"] for turn in said]
    assert len(set(seeds)) == len(seeds) == len(given[0]) - len(one) > len(one)
    assert {0.25, None} < {turn["reward"] for turn in said}
    assert max(row.get("turns/max", 0) for row in metrics_of(tmp_path / "of-1")) == 3
    assert_the_same_run(tmp_path / "of-2", tmp_path / "of-1", STEPS["max_steps"])
