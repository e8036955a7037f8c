"""The clipped surrogate, the KL estimators and the KL in the reward against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mm_grpo.algorithm.kl import completion_kl, k2, k3, penalised
from mm_grpo.algorithm.losses import clipped_surrogate


def test_surrogate_by_hand() -> None:
    # ratios 1, 1.5, 0.5, 1.5, 0.5 with advantages 2, 1, -1, -1, 1 and bounds 0.8, 1.28
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([2.0, 1.0, -1.0, -1.0, 1.0])
    s = clipped_surrogate(ratio.log(), advantages, 0.2, 0.28)
    assert s.loss.tolist() == pytest.approx([-2.0, -1.28, 0.8, 1.5, -0.5], abs=1e-6)
    assert s.clipped_high.tolist() == [False, True, False, False, False]
    assert s.clipped_low.tolist() == [False, False, True, False, False]


def test_clipped_tokens_carry_no_gradient_and_others_do() -> None:
    logp = torch.tensor([0.5, -1.0, 0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0])
    clipped_surrogate(logp, advantages, 0.2, 0.2).loss.sum().backward()
    # the third: -d(ratio * A) = ratio = e^0.5
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(0.5)], abs=1e-6)


def test_delta_bounds_the_ratio_of_negative_advantages() -> None:
    # ratio 6: -min(min(6, 4) * -1, 1.2 * -1) = 4 and no gradient; with advantage 1 the upper clip is there first
    log_weight = torch.tensor([6.0, 6.0]).log().requires_grad_()
    s = clipped_surrogate(log_weight, torch.tensor([-1.0, 1.0]), 0.2, 0.2, delta=4.0)
    assert s.loss.tolist() == pytest.approx([4.0, -1.2], abs=1e-6)
    s.loss.sum().backward()
    assert log_weight.grad is not None and log_weight.grad.tolist() == [0.0, 0.0]


def test_tokens_past_delta_are_marked_as_capped() -> None:
    # ratio 3 with the advantages -1 and 1, 6 with -1: only the last is past delta, and the second past its upper clip
    s = clipped_surrogate(torch.tensor([3.0, 3.0, 6.0]).log(), torch.tensor([-1.0, 1.0, -1.0]), 0.2, 0.2, 4.0)
    assert s.capped.tolist() == [False, False, True]
    assert s.clipped_high.tolist() == [False, True, False]  # counted as TRL counts
    open_above = clipped_surrogate(torch.tensor([6.0]).log(), torch.tensor([-1.0]), 0.2, 0.2)
    assert open_above.capped.tolist() == [False]


def test_k2_and_k3_by_hand() -> None:
    assert k2(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0])).tolist() == [0.0, 2.0]
    # d = 0: 0;  d = ln 2: 2 - ln 2 - 1;  d = -ln 2: 0.5 + ln 2 - 1
    logp = torch.tensor([-1.0, -1.0, -1.0])
    ref = logp + torch.tensor([0.0, math.log(2), -math.log(2)])
    assert k3(logp, ref).tolist() == pytest.approx([0.0, 1 - math.log(2), math.log(2) - 0.5], abs=1e-6)


def test_the_kl_of_a_completion_by_hand() -> None:
    # k1: 0.5 - 1 + 0; k2: (0.25 + 1) / 2; k3 with d = -0.5, 1, 0: (e^-0.5 + 0.5 - 1) + (e - 1 - 1)
    logp, ref = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5]
    assert completion_kl(logp, ref, "k1") == -0.5
    assert completion_kl(logp, ref, "k2") == 0.625
    assert completion_kl(logp, ref, "k3") == pytest.approx(math.exp(-0.5) - 0.5 + math.e - 2, abs=1e-12)
    assert completion_kl([], [], "k1") == 0.0
    with pytest.raises(ValueError, match="3 log-probabilities for 2 of the reference"):
        completion_kl(logp, ref[:2], "k1")


def test_penalties_come_off_rewards_and_none_stays() -> None:
    assert penalised([[1.0, None], [0.5, 2.0]], [[0.25, 9.0], [-0.5, 0.0]]) == [(0.75, None), (1.0, 2.0)]
    with pytest.raises(ValueError, match="zip"):
        penalised([[1.0, 2.0]], [[1.0]])
