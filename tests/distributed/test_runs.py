"""Whole runs are the same on 1 and on 2 processes, whatever is in them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import runs
from helpers import calling, processes
from helpers.run_folders import (
    assert_the_same_sight,
    metrics_of,
    rollouts_of,
    weights_of,
    write_config,
)
from safetensors.torch import load_file

# attempts, a KL in the reward from a reference that moves, an isolated reward that begins while others are sampled
REFILLED: dict[str, Any] = {
    "rewards": [{"name": "length", "max_length": 4, "isolated": True}],
    "rollout": {"num_generations": 2, "max_attempts": 3},
    "algorithm": {
        "beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1", "top_entropy_quantile": 0.8,
        "advantage_estimator": "rloo", "sync_ref_model": True, "ref_model_sync_steps": 2,
    },
}  # fmt: skip


TURNS: dict[str, Any] = {
    "model": {"processor": f"{calling.__file__}:Calling"},
    "rollout": {
        "prompts_per_step": 3, "num_generations": 3, "max_completion_length": 150, "max_turns": 3,
        "environment": f"{calling.__file__}:Gallery", "environment_workers": 0,
    },
    "algorithm": {"turn_gamma": 0.9},
    "run": {"max_steps": 2},
}  # fmt: skip


def refilled(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    replaced = {(row["step"], row["slot"]) for row in rows if row["attempt"]}
    assert len(rows) > 50 and len(replaced) > 2 and len({row["completion"] for row in rows}) > 20


def mixed(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    for step in range(1, 6):
        uids = {(row["slot"], row["uid"]) for row in rows if row["step"] == step}
        assert Counter(uid.partition(":")[0] for _, uid in uids) == {"train/shapes": 4, "train/shapes-2": 2}
    assert any(key.startswith("task/") for key in metrics[-1])


def in_turns(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    turns = [turn for row in rows for turn in row["turns"]]
    assert sum(turn["role"] == "tool" for turn in turns) > 10 and any(turn.get("images") for turn in turns)
    said = [turn for turn in turns if turn["role"] == "assistant"]
    assert len({turn["seed"] for turn in said}) == len(said) > len(rows)
    assert {0.25, None} < {turn["reward"] for turn in said}
    assert max(row.get("turns/max", 0) for row in metrics) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "check"),
    [(REFILLED, refilled), (runs.MIXTURE, mixed), (TURNS, in_turns)],
    ids=["refilled", "mixture", "turns"],
)
def test_one_and_two_processes_make_the_same_run(
    changes: dict[str, Any], check: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    folders = [tmp_path / f"of-{world}" for world in (1, 2)]
    for world, folder in enumerate(folders, 1):
        config = write_config(models["qwen2_5_vl"], folder, **changes)
        codes = processes.launch(
            Path(runs.__file__), world, [config], tmp_path / f"output-{world}", deadline=280
        )
        assert codes == [0] * world, processes.outputs(tmp_path / f"output-{world}", world)
    one, two = map(metrics_of, folders)
    # log-probs and advantages are numbers to compare closely; the rest is the same text
    rows, others = ([json.loads(x) for x in "".join(rollouts_of(f).values()).splitlines()] for f in folders)
    given = [
        [x.pop("advantage") for row in of_run for x in (row, *row.get("turns", ())) if "advantage" in x]
        for of_run in (rows, others)
    ]
    assert any("sight" in row for row in rows)
    for row, expected in zip(rows, others, strict=True):
        assert_the_same_sight(row, expected)
    assert rows == others and given[0] == pytest.approx(given[1], abs=1e-5) and any(given[0])
    check(rows, one)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("reward", "reward_std", "num_tokens", "completions/mean_length", "eval/eval/reward"):
            assert mine.get(key) == theirs.get(key), key
        for key in {"loss", "grad_norm", "entropy", "learner/update_norm", "kl", "sight/nats"} & mine.keys():
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key
        for key in (key for key in mine if key.startswith(("task/", "rewards/", "epoch", "eval/"))):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key
    base = load_file(models["qwen2_5_vl"] / "model.safetensors")
    weights = [weights_of(folder) for folder in folders]
    for name, first in weights[0].items():
        distance = (weights[1][name] - first).norm() / (first - base[name]).norm().clamp(min=1e-12)
        assert distance <= 1e-3, name  # ten updates, each of which starts from the last
