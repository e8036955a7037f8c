"""A KL of exactly 0, and corrections that drop nearly every token: what fires, what is healthy, what is not watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mm_grpo.config import AlgorithmConfig
from mm_grpo.health.loss_terms import MaskedShare, ZeroKL
from mm_grpo.learner.loss import LossInputs, PackTokens, pack_loss
from mm_grpo.learner.step_report import LossStatistics


def alarms(guard: Any, rows: list[dict[str, Any]]) -> dict[int, Any]:
    found = {step: guard.observe(step, row) for step, row in enumerate(rows, start=1)}
    return {step: alarm for step, alarm in found.items() if alarm is not None}


def test_a_kl_of_0_warns_10_steps_after_the_first_real_update() -> None:
    moving = [{"kl": 0.0, "learner/update_norm": 0.1}] * 15
    found = alarms(ZeroKL(), moving)
    assert list(found) == list(range(11, 16))  # step 1 is measured before any update
    assert found[11].action == "warn" and "for 10 steps the KL" in found[11].message
    assert "algorithm.beta=0" in found[11].message
    warm_up = [{"kl": 0.0, "learner/update_norm": 0.0}] * 30
    assert alarms(ZeroKL(), warm_up) == {}
    assert list(alarms(ZeroKL(), warm_up + moving)) == list(range(41, 46))


def test_a_tiny_kl_is_healthy_and_a_step_without_tokens_neither_counts_nor_ends_a_streak() -> None:
    step, none = {"kl": 0.0, "learner/update_norm": 0.1}, {"learner/update_norm": 0.0}
    assert alarms(ZeroKL(), ([step] * 9 + [{**step, "kl": 1e-12}]) * 4) == {}
    assert list(alarms(ZeroKL(), [step] * 6 + [none] * 9 + [step] * 6)) == [20, 21]


@pytest.mark.parametrize(
    ("fields", "watched"),
    [
        ({}, False),
        ({"beta": 0.1}, True),
        ({"beta": 0.1, "kl_in_reward": True}, False),
        ({"beta": 0.1, "sync_ref_model": True}, True),
        ({"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0}, False),
    ],
)
def test_the_kl_is_watched_where_it_ought_to_leave_0(fields: dict[str, Any], watched: bool) -> None:
    assert ZeroKL.watches(AlgorithmConfig(**fields)) is watched


def test_a_correction_that_drops_nearly_all_warns_and_one_that_drops_all_stops() -> None:
    nearly = alarms(MaskedShare(), [{"sampling/masked_ratio": 0.95}] * 40)
    assert list(nearly) == list(range(10, 41)) and {a.action for a in nearly.values()} == {"warn"}
    assert "importance_sampling_mode has dropped nearly all tokens, 95% in the last" in nearly[10].message
    every = alarms(MaskedShare(), [{"sampling/masked_ratio": 1.0}] * 21)
    assert [every[step].action for step in (10, 19, 20, 21)] == ["warn", "warn", "stop", "stop"]


def test_shares_that_are_healthy_or_do_not_last() -> None:
    assert (
        alarms(MaskedShare(), [{"sampling/masked_ratio": 0.4, "sampling/off_policy_ratio": 0.5}] * 40) == {}
    )
    assert (
        alarms(MaskedShare(), ([{"sampling/masked_ratio": 1.0}] * 9 + [{"sampling/masked_ratio": 0.0}]) * 4)
        == {}
    )
    assert alarms(MaskedShare(), [{}] * 40) == {}


def test_the_off_policy_mask_is_measured_on_the_tokens_that_it_may_drop() -> None:
    found = alarms(MaskedShare(), [{"sampling/off_policy_ratio": 0.9}] * 30)
    assert list(found) == list(range(10, 31)) and {a.action for a in found.values()} == {"warn"}
    assert (
        "off_policy_mask_threshold has dropped nearly all tokens of completions with a neg"
        in found[10].message
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_live_that_have_weight_an_advantage_and_a_gradient(dtype: torch.dtype) -> None:
    # ratios 2, 2, 0.5, 0.5, 1, 1: clipped is the first, and the fourth; the fifth has no advantage, the last no weight
    ratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.0, 1.0]).log().to(dtype)
    advantages, weights = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0]), torch.tensor([1.0] * 5 + [0.0])
    zeros, statistics = torch.zeros(6, dtype=dtype), LossStatistics()
    tokens = PackTokens(torch.arange(6), ratio, zeros, zeros, zeros, None)
    pack_loss(AlgorithmConfig(loss_type="dapo"), LossInputs(advantages, weights, 6), tokens, statistics)
    assert statistics.live_tokens == 2


def test_the_share_that_the_off_policy_mask_drops_by_hand() -> None:
    """Completions of 2, 1, 3 and 1 tokens: the first two have a negative advantage, and the first fell by 2 nats."""
    completion = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    sampling = torch.full((7,), -1.0)
    logp = torch.tensor([-3.0, -3.0, -1.1, -4.0, -4.0, -4.0, -9.0])
    weights = torch.tensor([0.1, 0.1, 0.1, 0.0])  # the last is masked, and does not count
    inputs = LossInputs(torch.tensor([-1.0, -1.0, 1.0, -1.0]), weights, 6)
    tokens = PackTokens(completion, logp, torch.zeros(7), logp, sampling, None)
    statistics = LossStatistics()
    pack_loss(AlgorithmConfig(off_policy_mask_threshold=0.5), inputs, tokens, statistics)
    assert statistics.metrics()["sampling/off_policy_ratio"] == pytest.approx(2 / 3)
    unmasked = LossStatistics()
    pack_loss(AlgorithmConfig(), inputs, tokens, unmasked)
    assert "sampling/off_policy_ratio" not in unmasked.metrics()
