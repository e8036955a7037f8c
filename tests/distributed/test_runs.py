"""Whole runs: the same on 1 and 2 processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
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
