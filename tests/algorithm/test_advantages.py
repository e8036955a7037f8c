"""Advantages against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from mm_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS, Objective, advantages, gdpo
from mm_grpo.config import AlgorithmConfig
from mm_grpo.errors import RewardError


@pytest.mark.parametrize(
    ("fields", "rewards", "numerators", "scales"),
    [
        # mean 0.5, sample deviation sqrt(4 * 0.25 / 3)
        ({}, [[1.0, 0.0, 0.0, 1.0]], [[0.5, -0.5, -0.5, 0.5]], [math.sqrt(1 / 3) + 1e-4]),
        ({}, [[None, 1.0, None], [None] * 3], [[0.0] * 3, [0.0] * 3], [1.0, 1.0]),
        # of 1, 0, 2, 2: mean 1.25, deviation sqrt((.0625 + 1.5625 + .5625 * 2) / 3)
        (
            {"scale_rewards": "batch"}, [[1.0, 0.0], [2.0, 2.0]], [[0.5, -0.5], [0.0, 0.0]],
            [math.sqrt(2.75 / 3) + 1e-4] * 2,
        ),
        ({"scale_rewards": "none"}, [[3.0, 1.0, 2.0], [1.0, None, 0.0]], [[1.0, -1.0, 0.0], [0.5, 0.0, -0.5]], [1, 1]),
        # 3 less the mean of 1 and 2; 1 less that of 3 and 2; 2 less that of 3 and 1
        (
            {"advantage_estimator": "rloo"}, [[3.0, 1.0, 2.0], [4.0, 4.0, 4.0], [1.0, None, 0.0], [None, 7.0, None]],
            [[1.5, -1.5, 0.0], [0.0] * 3, [1.0, 0.0, -1.0], [0.0] * 3], [1.0] * 4,
        ),
        # the squares of the differences sum to 18.5, over 5 is 3.7
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline"}, [[1.0, 0.0], [5.0, 5.0], [2.0, 8.0]],
            [[0.5, -0.5], [0.0, 0.0], [-3.0, 3.0]], [math.sqrt(3.7) + 1e-4] * 3,
        ),
        # over the means; a group that is all wrong says nothing
        (
            {"advantage_estimator": "maxrl"}, [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [None, 0.5, 0.25]],
            [[0.75, -0.25, -0.25, -0.25], [0.5, -0.5], [0.0, 0.0], [0.0, 0.125, -0.125]],
            [0.25 + 1e-6, 0.5 + 1e-6, 1.0, 0.375 + 1e-6],
        ),
    ],
)  # fmt: skip
def test_advantages_by_hand(fields: Any, rewards: Any, numerators: Any, scales: list[float]) -> None:
    found = advantages(rewards, AlgorithmConfig.model_validate(fields))
    for row, top, scale in zip(found, numerators, scales, strict=True):
        assert row == pytest.approx([x / scale for x in top], abs=1e-12)


def estimated(name: str, rewards: list[list[float | None]]) -> list[tuple[float, ...]]:
    return advantages(rewards, AlgorithmConfig(advantage_estimator=name))  # type: ignore[arg-type]


def test_every_estimator_of_the_config_is_there() -> None:
    names = get_args(AlgorithmConfig.model_fields["advantage_estimator"].annotation)
    assert set(ADVANTAGE_ESTIMATORS) == set(names)


def test_gdpo_by_hand() -> None:
    # The deviation of a pair is its distance over sqrt 2. First reward: 0.5 above and below in one group, equal
    # in the other. Second, of weight 0.5: 2 below and above, then 1 above and below.
    a = 0.5 / (1 / math.sqrt(2) + 1e-4)
    b = 2.0 / (4 / math.sqrt(2) + 1e-4)
    c = 1.0 / (2 / math.sqrt(2) + 1e-4)
    first, second = a - 0.5 * b, 0.5 * c
    scale = math.sqrt(2 * (first**2 + second**2) / 3) + 1e-4
    parts = [
        Objective(1.0, [[1.0, 0.0], [1.0, 1.0]], "right"),
        Objective(0.5, [[0.0, 4.0], [2.0, 0.0]], "short"),
    ]
    got = gdpo([[1.0, 2.0], [2.0, 1.0]], parts)
    assert got[0] == pytest.approx((first / scale, -first / scale), abs=1e-12)
    assert got[1] == pytest.approx((second / scale, -second / scale), abs=1e-12)


def test_gdpo_cancels_exactly() -> None:
    first = [0.1, 0.2, 0.7, 0.35]
    second = [1 - r for r in first]
    assert gdpo([[1.0] * 4], [Objective(0.3, [first]), Objective(0.3, [second])]) == [(0.0,) * 4]


def test_gdpo_leaves_out_what_does_not_apply() -> None:
    # The gated reward compares the two completions that passed; the masked one (total None) counts nowhere.
    gated = Objective(1.0, [[None, 1.0, 3.0, 100.0]])
    scale = 1.0 / (math.sqrt(2) + 1e-4)  # 1 and 3 differ by 2
    s = [0.0, -scale, scale]
    divisor = math.sqrt(2 * scale**2 / 2) + 1e-4
    (got,) = gdpo([[0.0, 1.0, 3.0, None]], [gated, Objective(0.0, [[5.0, 6.0, 7.0, 8.0]])])
    assert got == pytest.approx((0.0, s[1] / divisor, s[2] / divisor, 0.0), abs=1e-12)


def test_gdpo_goes_through_the_config() -> None:
    config = AlgorithmConfig(multi_objective_aggregation="normalize_then_sum")
    parts = [Objective(2.0, [[1.0, 0.0]])]
    assert advantages([[2.0, 0.0]], config, parts) == gdpo([[2.0, 0.0]], parts)
    with pytest.raises(ValueError, match="needs the scores of each reward"):
        advantages([[2.0, 0.0]], config)
    assert advantages([[None, None]], config) == [(0.0, 0.0)]


def test_maxrl_takes_no_reward_below_0() -> None:
    message = r"algorithm.advantage_estimator = 'maxrl': a total reward is -0.5; it divides"
    with pytest.raises(RewardError, match=message):
        estimated("maxrl", [[1.0, -0.5]])


@pytest.mark.parametrize("name", list(ADVANTAGE_ESTIMATORS))
def test_no_estimator_takes_what_is_not_finite(name: str) -> None:
    with pytest.raises(ValueError, match="reward of generation 0 in group 1 is -inf"):
        estimated(name, [[0.0, 1.0], [-math.inf, 0.0]])


def test_gdpo_names_the_reward_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="iou of generation 1 in group 0 is nan"):
        gdpo([[0.0, 1.0]], [Objective(1.0, [[0.0, math.nan]], "iou")])
