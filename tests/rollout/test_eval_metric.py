"""Intervals against figures computed by hand or by other packages, and the estimator of pass@k against all draws."""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import pytest

from mm_grpo.rollout.eval_metric import mean, normal, pass_at, wilson


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"), [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0)]
)
def test_wilson(right: int, rows: int, low: float, high: float) -> None:
    found = wilson([[1.0]] * right + [[0.0]] * (rows - right))
    assert found == pytest.approx((low, high), abs=1e-4)


def test_several_completions_of_a_row_do_not_narrow_an_interval() -> None:
    once = [[1.0], [0.0], [1.0], [1.0]]
    assert wilson([row * 8 for row in once]) == wilson(once)
    assert normal([row * 8 for row in once]) == pytest.approx(normal(once))


def test_the_interval_of_a_mean_is_of_the_rows_means() -> None:
    # means 1, 2, 6: mean 3, standard deviation sqrt(7), over sqrt(3) rows
    half = 1.959964 * sqrt(7) / sqrt(3)
    assert normal([[1.0], [2.0, 2.0], [6.0]]) == pytest.approx((2.75 - half, 2.75 + half))
    assert normal([[1.0, 2.0]]) is None and normal([]) is None and wilson([[]]) is None
    assert mean([[1.0], [], [2.0, 3.0]]) == 2.0 and mean([[]]) is None


@pytest.mark.parametrize("k", [1, 3])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(k: int) -> None:
    rows = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5, [0.0, 0.0, 0.0, 0.0, 1.0]]
    shares = []
    for row in rows:
        draws = list(combinations(row, k))
        shares.append(sum(any(draw) for draw in draws) / len(draws))
    assert pass_at(rows, k) == pytest.approx(sum(shares) / 3)
    assert pass_at(rows, 6) is None
