"""Groups without spread are replaced: which rows, which seeds, what is learned from and what is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import ROWS, config_for, rollouts_of, rows_of

from mm_grpo import GRPOTrainer
from mm_grpo.data.order import PromptOrder
from mm_grpo.rollout.seeds import SeedPlan

ROLLOUT = {"prompts_per_step": 4, "max_attempts": 3}
ROWS_THAT_DIFFER = [dict(row, flat=i % 3 != 0) for i, row in enumerate(ROWS)]


def partly_flat(completions: list[Any], flat: list[bool], **columns: Any) -> list[float]:
    """No spread on two rows of three, and no two equal rewards on the third."""
    return [0.5 if is_flat else place / 10 for place, is_flat in enumerate(flat)]


def run(path: Path, folder: Path, reward: Any, **rollout: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    seen: list[Any] = []
    run = {"max_steps": 2, "guards": {"no_update": "warn"}}
    config = config_for(path, folder, rollout=ROLLOUT | rollout, run=run)
    trainer = GRPOTrainer(config, train=ROWS_THAT_DIFFER, rewards=[reward])
    step = trainer.learner.update

    def noted(groups: Any) -> Any:
        seen.append(groups)
        return step(groups)

    trainer.learner.update = noted  # type: ignore[method-assign]
    trainer.train()
    return rows_of(folder), seen


@pytest.mark.field_bug("flat-groups")
def test_flat_groups_make_room_for_others(model: Path, tmp_path: Path) -> None:
    metrics, learned = run(model, tmp_path / "r", partly_flat)
    order = PromptOrder(6, 4, seed=5)
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=3, max_steps=2)
    for step in (1, 2):
        # worked out from the orders alone: a slot keeps its row, or goes on until one has spread
        want: dict[int, tuple[int, int]] = {}
        sampled = set()
        for slot, row in enumerate(order.rows(step)):
            tried = [row, *(order.spare(step, attempt, slot, 3) for attempt in (1, 2))]
            good = [a for a, r in enumerate(tried) if r % 3 == 0]
            attempt = good[0] if good else 2
            want[slot] = attempt, tried[attempt]
            sampled |= {(slot, a, f"train:{tried[a]}") for a in range(attempt + 1)}
        groups = learned[step - 1]
        assert {g.slot: (g.attempt, int(g.prompt.uid.split(":")[1])) for g in groups} == want
        for g in groups:
            assert [c.seed for c in g.completions] == list(plan.group(step, g.slot, g.attempt))
            assert any(g.advantages) == (want[g.slot][1] % 3 == 0)
        logged = rollouts_of(tmp_path / "r", step)
        assert {(r["slot"], r["attempt"], r["uid"]) for r in logged} == sampled
        assert len(logged) == 3 * len(sampled)
        assert all(r["advantage"] == 0 for r in logged if r["columns"]["flat"])

        row = metrics[step - 1]
        flat_at_first = [r for r in order.rows(step) if r % 3]
        assert row["frac_reward_zero_std"] == len(flat_at_first) / 4  # of the first attempt
        first = [r["reward"] for r in logged if r["attempt"] == 0]
        assert row["reward"] == pytest.approx(sum(first) / 12)
        assert row["dynamic_sampling/attempts"] == 1 + max(a for _, a, _ in sampled)
        assert row["dynamic_sampling/replaced"] == sum(a > 0 for a, _ in want.values())
        assert row["dynamic_sampling/without_spread"] == sum(r % 3 != 0 for _, r in want.values())
    assert {g.attempt for groups in learned for g in groups} > {0}  # the case was tried
