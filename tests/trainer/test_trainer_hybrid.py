"""A run of Qwen3.5, most of whose layers are of linear attention: it learns, and agrees with its engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.small_runs import ROWS, config_for, rows_of, vowels
from safetensors.torch import load_file

from mm_grpo import GRPOTrainer

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")


@pytest.mark.slow
def test_a_run_moves_its_layers(models: dict[str, Path], tmp_path: Path) -> None:
    path = models[tiny.HYBRID]
    optim = {"learning_rate": 1e-2, "max_tokens_per_pack": 200}
    config = config_for(path, tmp_path / "run", algorithm={"beta": 0.1}, optim=optim, run={"max_steps": 2})
    GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    rows = rows_of(tmp_path / "run")
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 1e-6
    assert all(r["sampling/sampling_logp_difference/max"] < 1e-5 for r in rows)
    assert all(r["learner/update_norm"] > 0 for r in rows)
    start, end = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "run" / "model"))
    moved = {n.partition(".layers.0.linear_attn.")[2] for n, t in end.items() if not torch.equal(t, start[n])}
    assert {f"{part}.weight" for part in (*PROJECTIONS, "conv1d", "norm")} | {"A_log", "dt_bias"} <= moved
