"""Rules of credit by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mm_grpo.algorithm.credit import dependency, keep_mass, pgpo, rule_weights, vppo
from mm_grpo.config import AlgorithmConfig


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_dependency_of_a_token_is_k3_with_bounds() -> None:
    found = dependency(of(-1.0, -3.0, -1.0, -30.0), of(-1.0, -1.0, -3.0, -1.0))
    assert found.tolist() == pytest.approx([0.0, math.exp(2) - 3, math.exp(-2) + 1, 10.0])
    near = dependency(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12]))  # of which float32 leaves no digit
    assert near.tolist() == pytest.approx([2**-25], rel=1e-3)


def test_pgpo_by_hand() -> None:
    """log(1 + S) is its own scale here: 0.1 / 0.5 below the threshold, 1 at it, then 1 + 3 * 0.3 / 0.5 and 1 + 3."""
    scaled = of(0.8, 0.0, 0.5, 1.0, 0.1)
    own, other = pgpo([torch.expm1(scaled), torch.expm1(3 * scaled + 1)], tau=0.5, beta=3.0)
    assert own.tolist() == pytest.approx([2.8 * 5 / 8, 0.0, 5 / 8, 4 * 5 / 8, 0.2 * 5 / 8])
    assert other.tolist() == pytest.approx(own.tolist())  # a completion is its own scale
    assert pgpo([of(0.0, 3.0)], tau=1.0, beta=2.0)[0].tolist() == pytest.approx([0.0, 2.0])
    flat, single = pgpo([of(0.0, 9e-5, 2e-5), of(4.0)], tau=0.4, beta=2.0)
    assert flat.tolist() == [1.0, 1.0, 1.0] and single.tolist() == [1.0]  # rounding decides nothing


def test_vppo_by_hand() -> None:
    """Means 1, 3 and 2 of an update, the last elsewhere: n = 0, 1, 0.5, their mean 0.5, so beta_max = 0.9 + 0.1 /
    0.5. Of five tokens two are kept, of one the only one."""
    first, second = vppo([of(0.0, 2.0, 0.0, 2.0, 1.0), of(3.0)], [1.0, 3.0, 2.0], top_share=0.4, beta_min=0.9)
    assert first.tolist() == pytest.approx([0.0, 0.9, 0.0, 0.9, 0.0])
    assert second.tolist() == pytest.approx([1.1])
    tied, flat = vppo([of(1.0, 0.9, 1.0, 1.0), of(1.0, 1.00009)], [1.0, 1.00005], top_share=0.5, beta_min=0.2)
    assert tied.tolist() == [1.0, 0.0, 1.0, 0.0] and flat.tolist() == [1.0, 1.0]  # rounding decides nothing
    assert vppo([], [], top_share=0.4, beta_min=0.9) == []


def test_the_mass_of_a_group_is_kept() -> None:
    """|A| is 2 * 2 + 1 * 3 = 7 before and 2 * 1 + 1 * 0.5 = 2.5 after."""
    weights, advantages = [of(1.0, 0.0), of(0.0, 0.5, 0.0)], [of(2.0, 2.0), of(-1.0, -1.0, -1.0)]
    kept = keep_mass(weights, advantages)
    assert [w.tolist() for w in kept] == [pytest.approx([2.8, 0.0]), pytest.approx([0.0, 1.4, 0.0])]
    turns = keep_mass([of(1.0, 0.0)], [of(0.0, 2.0)])  # what is weighed has no advantage
    assert turns[0].tolist() == [1.0, 1.0]


def test_options_reach_their_rule() -> None:
    cases = [
        ("pgpo", {"beta": 0.0}, [0.0, 2.0]),
        ("vppo", {}, [0.0, 1.0]),
        ("vppo", {"top_share": 1.0}, [1.0, 1.0]),
    ]
    for rule, options, weights in cases:
        credit = AlgorithmConfig.model_validate({"credit": {"rule": rule, **options}}).credit
        assert credit is not None
        assert rule_weights([of(0.0, 2.0)], [1.0], credit)[0].tolist() == weights
