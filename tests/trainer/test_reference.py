"""A reference policy that moves during the run: when it does, and that a resumed run has the same one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.small_runs import ROWS, config_for, rows_of, vowels

from mm_grpo import GRPOTrainer

MOVING = {"beta": 0.2, "sync_ref_model": True, "ref_model_mixup_alpha": 0.25, "ref_model_sync_steps": 2}


@pytest.mark.slow
def test_it_moves_every_so_many_steps_and_resumes_as_it_was(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_vl"]

    def trainer(name: str, resume: bool = False, **run: int) -> GRPOTrainer:
        run = {"max_steps": 3, "save_every": 2} | run
        config = config_for(path, tmp_path / name, algorithm=MOVING, run=run)
        return GRPOTrainer(config, train=ROWS, rewards=[vowels], resume=resume)

    whole = trainer("whole")
    assert whole.learner.reference is not None
    some = next(whole.learner.reference.model.parameters())
    seen: list[torch.Tensor] = []
    step = whole._step

    def noted(number: int) -> dict[str, float]:
        metrics = step(number)
        seen.append(some.detach().clone())
        return metrics

    whole._step = noted  # type: ignore[method-assign,assignment]
    whole.train()
    same = [torch.equal(a, b) for a, b in pairwise(seen)]
    assert same == [False, True]  # step 2 moves it

    trainer("cut", max_steps=2).train()
    trainer("cut", resume=True).train()
    ours, theirs = rows_of(tmp_path / "cut"), rows_of(tmp_path / "whole")
    assert [r["kl"] for r in ours] == [r["kl"] for r in theirs]
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]
    assert theirs[2]["kl"] > 0
