"""The prompt order: every row once an epoch, and the same in every process."""

from __future__ import annotations

from itertools import chain

import pytest

from mm_grpo.data.order import PromptOrder


def positions(order: PromptOrder, steps: int) -> list[int]:
    return list(chain.from_iterable(order.rows(step) for step in range(1, steps + 1)))


@pytest.mark.parametrize(("rows", "prompts"), [(7, 3), (3, 8)])
def test_every_row_comes_once_an_epoch(rows: int, prompts: int) -> None:
    used = positions(PromptOrder(rows, prompts, seed=1), rows)
    epochs = [used[at : at + rows] for at in range(0, len(used), rows)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(rows))] * prompts
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_is_pinned() -> None:
    # A change of these numbers changes every run that resumes.
    assert PromptOrder(8, 8, seed=0).rows(1) == [1, 7, 3, 5, 2, 6, 4, 0]
    assert PromptOrder(8, 8, seed=0).rows(2) == [1, 6, 0, 5, 4, 2, 7, 3]
    assert PromptOrder(8, 8, seed=1).rows(1) != [1, 7, 3, 5, 2, 6, 4, 0]
    assert [PromptOrder(8, 8, seed=0).spare(1, 1, slot, 2) for slot in range(8)] == [2, 4, 3, 6, 7, 1, 0, 5]


@pytest.mark.field_bug("lost-order")
def test_any_step_can_be_asked_for_first_however_steps_are_cut() -> None:
    assert PromptOrder(10, 4, seed=3).rows(9) == positions(PromptOrder(10, 4, seed=3), 9)[-4:]
    assert positions(PromptOrder(6, 2, seed=5), 9) == positions(PromptOrder(6, 3, seed=5), 6)


def test_epochs_and_steps() -> None:
    order = PromptOrder(10, 4, seed=0)
    assert [order.epochs(step) for step in (0, 1, 5)] == [{"epoch": 0.0}, {"epoch": 0.4}, {"epoch": 2.0}]
    assert [PromptOrder(n, 4, seed=0).steps_per_epoch for n in (10, 8, 3)] == [3, 2, 1]


def test_replacements_come_once_each_in_an_order_of_their_own() -> None:
    order = PromptOrder(12, 4, seed=3)
    attempts = [(step, attempt) for step in (1, 2) for attempt in (1, 2)]
    spares = [order.spare(step, attempt, slot, 3) for step, attempt in attempts for slot in range(4)]
    assert sorted(spares[:12]) == list(range(12))
    assert spares[:12] != [row for step in (1, 2, 3) for row in order.rows(step)]
