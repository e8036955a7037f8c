"""A run of Qwen3.5, most of whose layers are of linear attention: it learns, agrees with its engine, and resumes."""

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
def test_a_run_moves_its_layers_and_resumes_as_it_was(models: dict[str, Path], tmp_path: Path) -> None:
    path = models[tiny.HYBRID]

    def trainer(name: str, *, resume: bool = False, max_steps: int = 2) -> GRPOTrainer:
        config = config_for(
            path,
            tmp_path / name,
            algorithm={"beta": 0.1},
            optim={"learning_rate": 1e-2, "max_tokens_per_pack": 200},
            run={"max_steps": max_steps, "save_every": 1},
        )
        return GRPOTrainer(config, train=ROWS, rewards=[vowels], resume=resume)

    trainer("whole").train()
    trainer("cut", max_steps=1).train()
    trainer("cut", resume=True).train()
    whole, cut = rows_of(tmp_path / "whole"), rows_of(tmp_path / "cut")
    assert [r["loss"] for r in whole] == [r["loss"] for r in cut] and whole[1]["loss"] != whole[0]["loss"]
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-6) and whole[1]["kl"] > 1e-6
    assert all(r["sampling/sampling_logp_difference/max"] < 1e-5 for r in whole)
    assert all(r["learner/update_norm"] > 0 for r in whole)
    start, end, again = (
        load_file(folder / "model.safetensors")
        for folder in (path, tmp_path / "whole" / "model", tmp_path / "cut" / "model")
    )
    assert all(torch.equal(t, again[n]) for n, t in end.items())
    moved = {n.partition(".layers.0.linear_attn.")[2] for n, t in end.items() if not torch.equal(t, start[n])}
    assert {f"{part}.weight" for part in (*PROJECTIONS, "conv1d", "norm")} | {"A_log", "dt_bias"} <= moved
