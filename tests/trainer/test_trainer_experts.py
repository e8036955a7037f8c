"""A run of a mixture of experts learns, with its routers or without them, and agrees with its engine."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
from helpers.small_runs import ROWS, config_for, rows_of
from safetensors.torch import load_file

from mm_grpo import GRPOTrainer


def vowels(completion: str) -> float:
    return sum(c in "aeiou" for c in completion) / 6


@pytest.mark.slow
@pytest.mark.parametrize(("family", "frozen"), [("qwen3_vl_moe", False), ("qwen3_5_moe", True)])
def test_a_mixture_learns(family: str, frozen: bool, models: dict[str, Path], tmp_path: Path) -> None:
    path, rollout = models[family], {"num_generations": 8}
    options = {"rollout": rollout, "model": {"freeze_router": frozen}, "optim": {"learning_rate": 3e-3}}
    config = config_for(path, tmp_path / "run", run={"max_steps": 30}, **options)
    GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    rows = rows_of(tmp_path / "run")
    rewards = [row["reward"] for row in rows]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.3
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4 for row in rows)
    start, end = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "run" / "model"))
    still = {name for name, tensor in end.items() if torch.equal(tensor, start[name])}
    assert still == {name for name in end if name.endswith("mlp.gate.weight") and frozen}
