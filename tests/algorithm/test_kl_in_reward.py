"""k1, and the KL as a penalty on rewards, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mm_grpo.algorithm.kl import ESTIMATORS, completion_kl, k1, k2, penalised

LOGP = torch.tensor([-1.0, -2.0, -0.5])
REF = torch.tensor([-1.5, -1.0, -0.5])


def test_k1_by_hand() -> None:
    assert k1(LOGP, REF).tolist() == [0.5, -1.0, 0.0]


def test_the_kl_of_a_completion_by_hand() -> None:
    # k1: 0.5 - 1 + 0; k2: (0.25 + 1) / 2; k3 with d = -0.5, 1, 0: (e^-0.5 + 0.5 - 1) + (e - 1 - 1)
    logp, ref = LOGP.tolist(), REF.tolist()
    assert completion_kl(logp, ref, "k1") == -0.5
    assert completion_kl(logp, ref, "k2") == 0.625
    assert completion_kl(logp, ref, "k3") == pytest.approx(math.exp(-0.5) - 0.5 + math.e - 2, abs=1e-12)
    assert completion_kl([], [], "k1") == 0.0
    with pytest.raises(ValueError, match="3 log-probabilities for 2 of the reference"):
        completion_kl(logp, ref[:2], "k1")


def test_the_sum_keeps_small_differences() -> None:
    # In single precision 4096 + 2^-12 is 4096.
    assert completion_kl([4096.0, 2.0**-12], [0.0, 0.0], "k1") == 4096.0 + 2.0**-12


def test_penalties_come_off_rewards_and_none_stays() -> None:
    assert penalised([[1.0, None], [0.5, 2.0]], [[0.25, 9.0], [-0.5, 0.0]]) == [(0.75, None), (1.0, 2.0)]
    with pytest.raises(ValueError, match="zip"):
        penalised([[1.0, 2.0]], [[1.0]])


def test_the_estimators_mean_the_same_divergence() -> None:
    # Policy (0.5, 0.25, 0.25) and reference (0.25, 0.25, 0.5): KL = 0.5 ln 2 - 0.25 ln 2 = 0.25 ln 2
    policy, reference = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    kl = 0.25 * math.log(2)
    for name in ("k1", "k3"):
        mean = (policy * ESTIMATORS[name](policy.log(), reference.log())).sum()
        assert float(mean) == pytest.approx(kl, abs=1e-12), name
    # k2: (0.5 + 0.25) ln^2 2 / 2
    mean = (policy * k2(policy.log(), reference.log())).sum()
    assert float(mean) == pytest.approx(0.375 * math.log(2) ** 2, abs=1e-12)
