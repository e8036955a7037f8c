"""Advantages of turns: returns and comparisons worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mm_grpo.algorithm.turn_advantages import discounted_returns, turn_advantages
from mm_grpo.config import AlgorithmConfig, GRPOConfig
from mm_grpo.errors import ConfigError


def config(gamma: float | None = 0.5, **algorithm: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"turn_gamma": gamma, **algorithm})


@pytest.mark.parametrize(
    ("rewards", "gamma", "returns"),
    [
        ([1.0, 2.0, 4.0], 0.5, [3.0, 4.0, 4.0]),
        ([1.0, 2.0, 4.0], 1.0, [7.0, 6.0, 4.0]),
        ([1.0, 2.0, 4.0], 0.0, [1.0, 2.0, 4.0]),
        ([None, None, 4.0], 0.5, [1.0, 2.0, 4.0]),
        ([2.0, None, None], 0.5, [2.0, None, None]),  # nothing is known of what the later turns were worth
        ([None, 3.0, None], 0.0, [None, 3.0, None]),  # at 0 a turn is paid for itself alone
        ([None, None], 1.0, [None, None]),
        ([], 1.0, []),
    ],
)
def test_returns_by_hand(rewards: list[float | None], gamma: float, returns: list[float | None]) -> None:
    assert discounted_returns(rewards, gamma) == returns


def test_turns_are_compared_with_the_same_turn_of_the_others() -> None:
    """Returns [2, 2], [1, 2], [6]: first turns 2, 1, 6 with mean 3 and variance 7; second ones are equal."""
    (found,) = turn_advantages([[[1.0, 2.0], [0.0, 2.0], [6.0]]], config())
    scale = math.sqrt(7) + 1e-4
    assert found[0] == pytest.approx((-1 / scale, 0.0)) and found[0][1] == 0.0
    assert found[1] == pytest.approx((-2 / scale, 0.0)) and found[2] == pytest.approx((3 / scale,))


def test_a_turn_without_a_reward_or_without_company_has_none() -> None:
    """Of second turns one has no reward, of third ones there is one."""
    (found,) = turn_advantages([[[1.0, None], [2.0, 4.0, 8.0], [None]]], config(1.0))
    assert found[0][1] == 0.0 and found[1][1:] == (0.0, 0.0) and found[2] == (0.0,)
    half = (14 - 1) / 2  # returns 1 and 14
    assert found[0][0] == pytest.approx(-half / (13 / math.sqrt(2) + 1e-4)) and found[1][0] == -found[0][0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # returns: group 0 has first turns 1, 3 and one second turn 2; group 1 first turns 0, 4
        ({"scale_rewards": "none"}, [-1.0, 1.0, -2.0, 2.0]),
        ({"scale_rewards": "batch"}, [x / (math.sqrt(2.5) + 1e-4) for x in (-1.0, 1.0, -2.0, 2.0)]),
        ({"advantage_estimator": "rloo"}, [-2.0, 2.0, -4.0, 4.0]),
        ({"advantage_estimator": "maxrl"}, [x / (2 + 1e-6) for x in (-1.0, 1.0, -2.0, 2.0)]),
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline"},
            [x / (math.sqrt(10 / 4) + 1e-4) for x in (-1.0, 1.0, -2.0, 2.0)],
        ),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_every_estimator_and_scale(how: dict[str, str], expected: list[float]) -> None:
    """The scale of a step counts all turns: 1, 3, 2, 0, 4 have the sample variance 2.5, their differences 10 / 4."""
    found = turn_advantages([[[1.0], [1.0, 2.0]], [[0.0], [4.0]]], config(1.0, **how))
    first = [own[0] for group in found for own in group]
    assert first == pytest.approx(expected) and found[0][1][1] == 0.0


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level = sequence: .* must be token"),
        ({"loss_type": "gmpo"}, "loss_type = gmpo: .*algorithm.turn_gamma"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "must be sum_then_normalize"),
        ({"kl_in_reward": True, "beta": 0.1}, "kl_in_reward = true: .* must be false"),
        ({"turn_gamma": 1.5}, "turn_gamma = 1.5"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_turns_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        GRPOConfig.from_dict({"model": {"path": "m"}, "algorithm": {"turn_gamma": 0.9, **algorithm}})
    assert str(refused.value).count("algorithm.") <= 4
