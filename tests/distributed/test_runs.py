"""Whole runs: the same on 1 and 2 processes, and the same when they are killed on the way and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from helpers import processes
from helpers.run_folders import assert_the_same_sight, metrics_of, rollouts_of, weights_of, write_config
from safetensors.torch import load_file

SCRIPT = Path(runs.__file__)


def run(config: Path, world: int, output: Path, *arguments: object) -> None:
    codes = processes.launch(SCRIPT, world, [config, *arguments], output, deadline=280)
    assert codes == [0] * world, processes.outputs(output, world)


REFILLED: dict[str, Any] = {
    "rewards": [{"name": "length", "max_length": 4, "isolated": True}],  # which begins while others are sampled
    "rollout": {"num_generations": 2, "max_attempts": 3},
    "algorithm": {
        "beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1", "top_entropy_quantile": 0.8,
        "advantage_estimator": "rloo",
    },
}  # fmt: skip
MOVED: dict[str, Any] = {
    "algorithm": {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "advantage_estimator": "rloo",
    },
}


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, REFILLED, MOVED], ids=["plain", "refilled", "moved"])
def test_one_and_two_processes_make_the_same_run(
    changes: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    for world in (1, 2):
        folder = tmp_path / f"of-{world}"
        run(write_config(models["qwen2_5_vl"], folder, **changes), world, tmp_path / f"output-{world}")
    one, two = (metrics_of(tmp_path / f"of-{world}") for world in (1, 2))
    # log-probs and advantages are numbers to compare closely; the rest is the same text
    lines = [
        [json.loads(x) for x in "".join(rollouts_of(tmp_path / f"of-{w}").values()).splitlines()]
        for w in (1, 2)
    ]
    given = [[row.pop("advantage") for row in rows] for rows in lines]
    assert sum("sight" in row for row in lines[0]) >= 8
    for row, expected in zip(*lines, strict=True):
        assert_the_same_sight(row, expected)
    assert lines[0] == lines[1] and given[0] == pytest.approx(given[1], abs=1e-5)
    replaced = len({(row["step"], row["slot"]) for row in lines[0] if row["attempt"]})
    assert len(lines[0]) == 100 if changes is not REFILLED else len(lines[0]) > 50 and replaced > 2
    assert len({row["completion"] for row in lines[0]}) > 20 and any(given[0])
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("reward", "reward_std", "num_tokens", "completions/mean_length", "eval/eval/reward"):
            assert mine.get(key) == theirs.get(key), key
        for key in {"loss", "grad_norm", "entropy", "learner/update_norm", "kl", "sight/nats"} & mine.keys():
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key
    base = load_file(models["qwen2_5_vl"] / "model.safetensors")
    weights = [weights_of(tmp_path / f"of-{world}") for world in (1, 2)]
    for name, first in weights[0].items():
        distance = (weights[1][name] - first).norm() / (first - base[name]).norm().clamp(min=1e-12)
        assert distance <= 1e-3, name  # ten updates, each of which starts from the last


@pytest.mark.long
def test_a_run_that_is_killed_ten_times_is_the_run_that_was_not(
    models: dict[str, Path], tmp_path: Path
) -> None:
    every, steps = 3, 30
    kept = {"run": {"max_steps": steps, "save_every": every, "eval_every": 7, "report": False}}
    for name, kills in (("straight", ()), ("killed", (10,))):
        folder = tmp_path / name
        changes = {
            "run": {**kept["run"], "dir": str(folder)},
            "rollout": {"prompts_per_step": 3, "num_generations": 3, "max_completion_length": 6},
        }
        run(write_config(models["qwen2_5_vl"], folder, **changes), 1, tmp_path / f"output-{name}", *kills)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    kills = json.loads((killed / "kills.json").read_text())
    assert len(kills) == 10 and sum(bool(k["left"]) for k in kills) >= 2  # some in the midst of a checkpoint
    assert all(k["rows"] - k["checkpoint"] <= every for k in kills)
    assert (
        metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == steps + 1
    )  # and the first evaluation
    assert rollouts_of(killed) == rollouts_of(straight)
    for name, weight in weights_of(straight).items():
        assert torch.equal(weights_of(killed)[name], weight), name
    files = {str(p.relative_to(straight)) for p in straight.rglob("*") if p.is_file()}
    assert {str(p.relative_to(killed)) for p in killed.rglob("*") if p.is_file()} == files | {"kills.json"}


@pytest.mark.long
def test_two_processes_that_are_killed_go_on(models: dict[str, Path], tmp_path: Path) -> None:
    kept = {"max_steps": 6, "save_every": 2, "report": False, "eval_every": 0}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        config = write_config(models["qwen2_5_vl"], folder, run={**kept, "dir": str(folder)})
        if name == "killed":
            killed_after(config, folder, 3, tmp_path / "output-first")
        run(config, 2, tmp_path / f"output-{name}")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == 7
    for name, weight in weights_of(straight).items():
        assert torch.equal(weights_of(killed)[name], weight), name


def killed_after(config: Path, folder: Path, rows: int, output: Path) -> None:
    """Start two processes and kill the second one when the log has so many rows; the first then ends too."""
    codes = processes.launch(
        SCRIPT, 2, [config], output, deadline=280, kill=(1, lambda: runs.rows_of(folder) >= rows)
    )
    assert codes[1] == -9 and codes[0] != 0
    said = (output / "rank-0.txt").read_text()
    assert "lost another one while exchanging" in said or "Connection closed" in said, said[-2000:]
