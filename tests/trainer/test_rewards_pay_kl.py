"""A run whose rewards pay for the KL: what is logged is what was compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import ROWS, config_for, rollouts_of, rows_of, vowels

from mm_grpo import GRPOTrainer


def test_advantages_are_those_of_rewards_less_the_kl(model: Path, tmp_path: Path) -> None:
    paid = {"beta": 0.3, "kl_in_reward": True, "kl_estimator": "k1", "scale_rewards": "none"}
    rate, run = {"learning_rate": 0.02}, {"max_steps": 2}
    config = config_for(model, tmp_path / "r", algorithm=paid, optim=rate, run=run)
    trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels])
    ratios: list[list[list[float]]] = []
    step = trainer.learner.update

    def noted(groups: Any) -> Any:
        ratios.append([])  # log-ratios of the samples, before the update
        for group in groups:
            (references,) = trainer.learner.reference_logprobs([(group.prompt, group.completions)])
            pairs = zip(group.completions, references, strict=True)
            ratios[-1].append([sum(completion.logprobs) - sum(reference) for completion, reference in pairs])
        return step(groups)

    trainer.learner.update = noted  # type: ignore[method-assign]
    trainer.train()
    assert max(abs(x) for group in ratios[0] for x in group) < 1e-4  # the policy is its reference at first
    second, tokens = ratios[1], 0
    logged = rollouts_of(tmp_path / "r", 2)
    assert max(abs(x) for group in second for x in group) > 0.01
    for slot, costs in enumerate(second):
        mine = [r for r in logged if r["slot"] == slot]
        tokens += sum(r["tokens"] for r in mine)
        paid_rewards = torch.tensor([r["reward"] - 0.3 * kl for r, kl in zip(mine, costs, strict=True)])
        want = (paid_rewards - paid_rewards.mean()).tolist()
        assert [r["advantage"] for r in mine] == pytest.approx(want, abs=1e-5)
    total = sum(x for group in second for x in group)
    assert rows_of(tmp_path / "r")[1]["kl"] == pytest.approx(total / tokens, rel=1e-4, abs=1e-6)
