"""Which groups move between processes, by hand and by law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import tiny
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.balance import GAIN, balanced, plan_moves
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt


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
def test_moves_by_hand(loads: list[dict[int, int]], moves: dict[int, int]) -> None:
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


def test_a_moved_group_leaves_what_only_rewards_and_engines_look_at() -> None:
    sent: list[list[Group]] = []

    class Two(Ranks):
        """Rank 0 of two, of which the other has no group."""

        def all_gather(self, value: Any, what: str) -> list[Any]:
            return [value, {}]

        def all_to_all(self, parcels: Any, what: str) -> list[Any]:
            sent.extend(parcels)
            return [parcels[0], []]

    sample = tiny.sample("r:0", "what", (tiny.picture(1),), answer="red", other=1)
    prompt = Prompt(sample, (1, 2), EnginePrompt((1,), sample.images), torch.arange(2), {"p": torch.ones(1)})
    completion = Completion((5,), (-1.0,), "a", "stop", seed=0)
    one = Group(0, prompt, (completion,), (1.0,), (1.0,), parts={"r": [1.0]}, extra={"note": ["n"]})
    kept = balanced([one, replace(one, slot=2)], lambda group: (0, 5), Two(0, 2))
    assert [g.slot for g in kept] == [2] and kept[0].prompt is prompt and kept[0].extra == {"note": ["n"]}
    ((), (moved,)) = sent
    assert (moved.slot, moved.prompt.sample.images, moved.prompt.engine_prompt.images) == (0, (), ())
    assert (moved.parts, moved.extra) == ({}, {})
    sent.clear()
    balanced([one, replace(one, slot=2)], lambda group: (0, 5), Two(0, 2), images=True)
    ((), (whole,)) = (
        sent  # what is to be laid out anew goes with its text and images, and no column but its answer
    )
    assert whole.prompt.engine_prompt is prompt.engine_prompt and whole.prompt.sample.images == sample.images
    assert (whole.prompt.sample.messages, whole.prompt.sample.columns) == (sample.messages, {"answer": "red"})
    # what the learner needs is there
    assert moved.prompt.uid == "r:0" and moved.prompt.vision is prompt.vision
    assert (moved.completions, moved.advantages) == ((completion,), (1.0,))
