"""Rows drawn by their pass rates: how often each comes, when a pass is drawn, and that a resume draws the same."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mm_grpo.data.order import PromptOrder
from mm_grpo.data.pass_rate_order import PassRateOrder


def shares(step: int, order: PassRateOrder) -> list[tuple[int, float]]:
    """Even rows are solved half of the time, of odd ones a part that depends on the step."""
    return [(row, 0.5 if row % 2 == 0 else (step + row) % 5 / 4) for row in order.rows(step)]


def run(order: PassRateOrder, first: int, last: int) -> list[list[int]]:
    found = []
    for step in range(first, last + 1):
        order.rows(step + order.lag - 1)  # as far ahead as prompts are ever made
        found.append(order.rows(step))
        order.observe(step, shares(step, order))
    return found


def test_rows_near_one_half_come_in_proportion_from_the_second_pass_on() -> None:
    order = PassRateOrder(100, 10, 3, factor=1.0)
    passes: list[Counter[int]] = []
    for step in range(1, 21):
        rows = order.rows(step)
        passes += [Counter()] if step % 10 == 1 else []
        passes[-1].update(rows)
        order.observe(step, [(row, 0.5 if row < 50 else row % 2) for row in rows])
    assert passes[0] == dict.fromkeys(range(100), 1)
    # the groups of step 10 are not known when the second pass is drawn: their rows count as one half
    unknown = PromptOrder(100, 10, 3).rows(10)
    weights = [1.0 if row < 50 or row in unknown else 0.1 for row in range(100)]
    for row, weight in enumerate(weights):
        assert abs(passes[1][row] - 100 * weight / sum(weights)) < 1
    assert passes[1].total() == 100 and rows != sorted(rows)


def test_an_estimate_moves_by_the_factor_towards_each_share() -> None:
    order = PassRateOrder(4, 4, 0, factor=0.25)
    for step, share in enumerate((1.0, 0.0, 0.5), start=1):
        order.observe(step, [(2, share)])
    assert order.rates == [None, None, 0.6875, None]  # 1, 0.75, and a quarter of the way to one half


@pytest.mark.parametrize(("rows", "prompts", "staleness"), [(7, 3, 0), (7, 3, 2), (3, 8, 1), (12, 4, 1)])
def test_a_resumed_order_goes_on_as_the_whole_one(rows: int, prompts: int, staleness: int) -> None:
    def new_order() -> PassRateOrder:
        return PassRateOrder(rows, prompts, 5, 0.5, staleness)

    whole = run(new_order(), 1, 16)
    plain = [PromptOrder(rows, prompts, 5).rows(step) for step in range(1, 17)]
    assert whole[0] == plain[0] and whole != plain
    for done in range(16):
        before, after = new_order(), new_order()
        run(before, 1, done)
        after.restore(json.loads(json.dumps(before.state())))
        assert run(after, done + 1, 16) == whole[done:]


def test_a_step_is_not_asked_for_before_its_pass_is_drawn() -> None:
    order = PassRateOrder(8, 4, 0, 0.5)
    assert order.first_step(2) == 5 and [order.draws_in(steps) for steps in (2, 3)] == [False, True]
    with pytest.raises(ValueError, match="step 3"):
        order.rows(3)
    order.observe(1, [(0, 1.0)])
    order.observe(2, [(0, 0.0), (1, 1.0), (1, 1.0)])
    order.rows(4)
    assert order.rates[:3] == [0.5, 1.0, None]
