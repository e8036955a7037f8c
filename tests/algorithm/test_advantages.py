"""Advantages against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from mm_grpo.algorithm.advantages import group_advantages


def test_group_scale_by_hand() -> None:
    # rewards 1, 0, 0, 1: mean 0.5, sample deviation sqrt(4 * 0.25 / 3) = 0.57735
    (a,) = group_advantages([[1.0, 0.0, 0.0, 1.0]])
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert a == pytest.approx((expected, -expected, -expected, expected), abs=1e-12)


def test_batch_scale_by_hand() -> None:
    # all rewards 1, 0, 2, 2: mean 1.25, deviation sqrt((.0625 + 1.5625 + .5625 * 2) / 3) = sqrt(2.75 / 3)
    first, second = group_advantages([[1.0, 0.0], [2.0, 2.0]], "batch")
    scale = math.sqrt(2.75 / 3) + 1e-4
    assert first == pytest.approx((0.5 / scale, -0.5 / scale), abs=1e-12)
    assert second == (0.0, 0.0)


def test_no_scale_by_hand() -> None:
    assert group_advantages([[3.0, 1.0, 2.0]], "none") == [(1.0, -1.0, 0.0)]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e-9, 123456.789])
def test_equal_rewards_give_exact_zeros(value: float) -> None:
    assert group_advantages([[value] * 7]) == [(0.0,) * 7]


def test_none_leaves_the_baseline_and_gets_zero() -> None:
    (a,) = group_advantages([[1.0, None, 0.0]], "none")
    assert a == (0.5, 0.0, -0.5)
    assert group_advantages([[None, 1.0, None], [None, None, None]]) == [(0.0,) * 3, (0.0,) * 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="generation 1 in group 0"):
        group_advantages([[0.0, bad]])
