"""Which groups move between processes, by hand and by law."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.learner.balance import GAIN, plan_moves


@pytest.mark.parametrize(
    ("loads", "moves"),
    [
        ([{0: 5, 2: 5}, {1: 5, 3: 5}], {}),  # even
        ([{0: 5, 2: 5}, {1: 0, 3: 0}], {0: 1}),  # all on one: the first of two equal ones goes
        ([{0: 9}, {}], {}),  # a single group cannot be shared out
        ([{}, {}], {}),
        ([{0: 8, 2: 6, 4: 2}, {1: 2, 3: 0}], {2: 1}),  # 16 and 2: 6 leaves 10 and 8, 8 would leave 8 and 10
        ([{0: 100, 2: 1}, {1: 99}], {}),  # 1 of 100 is not worth the way
        ([{0: 6, 3: 6, 6: 6}, {1: 0}, {2: 0}], {0: 1, 3: 2}),
        ([{0: 4, 4: 4}, {1: 4, 5: 4}, {2: 4, 6: 4}, {}], {0: 3}),
    ],
)
def test_by_hand(loads: list[dict[int, int]], moves: dict[int, int]) -> None:
    assert plan_moves(loads) == moves


@given(st.lists(st.lists(st.integers(0, 1000), max_size=6), min_size=2, max_size=6))
def test_moves_even_out_and_lose_nothing(costs: list[list[int]]) -> None:
    world = len(costs)
    loads = [{rank + world * i: c for i, c in enumerate(own)} for rank, own in enumerate(costs)]
    moves = plan_moves(loads)
    where = {slot: rank for rank, load in enumerate(loads) for slot in load}
    assert moves.keys() <= where.keys() and all(0 <= rank < world for rank in moves.values())
    cost = {slot: c for load in loads for slot, c in load.items()}
    assert all(cost[slot] > 0 for slot in moves)
    after = [0] * world
    for slot, rank in (where | moves).items():
        after[rank] += cost[slot]
    before = [sum(load.values()) for load in loads]
    assert max(after, default=0) <= max(before)
    # nothing is left on the busiest that would relieve it noticeably
    mean = sum(before) / world
    busiest, gap = after.index(max(after)), max(after) - min(after)
    left = [c for slot, c in cost.items() if (where | moves)[slot] == busiest and 0 < c < gap]
    assert all(min(c, gap - c) < max(GAIN * mean, 1e-9) for c in left)
