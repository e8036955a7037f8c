"""k1, and the KL as a penalty on rewards, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mm_grpo.algorithm.kl import completion_kl, penalised

LOGP = torch.tensor([-1.0, -2.0, -0.5])
REF = torch.tensor([-1.5, -1.0, -0.5])


def test_the_kl_of_a_completion_by_hand() -> None:
    # k1: 0.5 - 1 + 0; k2: (0.25 + 1) / 2; k3 with d = -0.5, 1, 0: (e^-0.5 + 0.5 - 1) + (e - 1 - 1)
    logp, ref = LOGP.tolist(), REF.tolist()
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
