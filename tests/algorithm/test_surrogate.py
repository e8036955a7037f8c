"""The clipped surrogate and the KL estimators against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mm_grpo.algorithm.kl import k2, k3
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
