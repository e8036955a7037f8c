"""The order of a mixture: exact shares, every row once a pass, nothing twice in a step, and a pure function."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.data.mixture_order import MixtureOrder, ratio


def order(
    sizes: list[int], weights: list[float], prompts: int, seed: int = 3, shuffle: bool = True
) -> MixtureOrder:
    return MixtureOrder(sizes, weights, [f"s{i}" for i in range(len(sizes))], prompts, seed, shuffle)


def source_of(sizes: list[int], row: int) -> int:
    return next(i for i in range(len(sizes)) if row < sum(sizes[: i + 1]))


def test_weights_become_the_smallest_whole_numbers() -> None:
    assert ratio([3, 1]) == ratio([0.75, 0.25]) == ratio([6.0, 2]) == [3, 1]
    assert ratio([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert ratio([1 / 3, 1 / 3]) == [1, 1]


def test_three_to_one_by_hand() -> None:
    made = order([10, 10], [3, 1], 4, shuffle=False)
    # round(q * 3 / 4) of the first q prompts are the first source's, halves up: 0 1 2 2 3 | 4 5 5 6
    assert made.rows(1) == [0, 1, 10, 2] and made.rows(2) == [3, 4, 11, 5]
    assert made.rows(4) == [9, 0, 13, 1]  # the first source begins again


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=7),
    st.integers(1, 9),
)
def test_no_source_is_ever_two_prompts_off_its_share(weights: list[int], prompts: int) -> None:
    sizes = [7] * len(weights)
    made, total = order(sizes, list(map(float, weights)), prompts), sum(weights)
    counts: Counter[int] = Counter()
    plain = order(sizes, list(map(float, weights)), 1, shuffle=False)
    for position in range(1, 2 * total + 1):
        counts[source_of(sizes, plain.rows(position)[0])] += 1
        for source, weight in enumerate(weights):
            assert abs(counts[source] - Fraction(position * weight, total)) < 2
        if position % total == 0:
            assert [counts[s] * total for s in range(len(weights))] == [w * position for w in weights]
    whole = Counter(source_of(sizes, row) for step in range(1, total + 1) for row in made.rows(step))
    assert [whole[s] for s in range(len(weights))] == [w * prompts * total // total for w in weights]


def test_steps_hold_exact_shares_in_an_order_that_strides_do_not_alias() -> None:
    sizes = [400, 300, 200]
    made = order(sizes, [2, 1, 1], 8)
    first_half: Counter[int] = Counter()
    for step in range(1, 101):
        rows = made.rows(step)
        assert Counter(source_of(sizes, row) for row in rows) == {0: 4, 1: 2, 2: 2}
        first_half.update(source_of(sizes, row) for row in rows[0::2])  # what the first of two processes gets
    assert abs(first_half[0] - 200) < 40 and min(first_half.values()) > 60


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=2, max_size=4),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_every_row_comes_once_a_pass_and_once_a_step(
    sources: list[tuple[int, int]], prompts: int, seed: int
) -> None:
    sizes, weights = [size for size, _ in sources], [float(weight) for _, weight in sources]
    made = order(sizes, weights, prompts, seed)
    drawn: dict[int, list[int]] = {source: [] for source in range(len(sizes))}
    for step in range(1, 41):
        of_step = Counter(made.rows(step))
        taken = Counter(source_of(sizes, row) for row in of_step.elements())
        for row, count in of_step.items():
            source = source_of(sizes, row)
            assert count == 1 or taken[source] > sizes[source]
        unshuffled = made._dealt(step)
        for source in drawn:
            before = made._dealt(step - 1)[source]
            new = [made._sources[source].row(draw) for draw in range(before, unshuffled[source])]
            assert sorted(sum(sizes[:source]) + row for row in new) == sorted(
                row for row in of_step.elements() if source_of(sizes, row) == source
            )
            drawn[source] += new
    for source, rows in drawn.items():
        for start in range(0, len(rows) - sizes[source] + 1, sizes[source]):
            assert sorted(rows[start : start + sizes[source]]) == list(range(sizes[source]))


@pytest.mark.parametrize("sizes", [[5, 400], [3, 2], [6, 6]])
def test_a_later_step_alone_is_the_step_of_a_whole_run(sizes: list[int]) -> None:
    straight, steps = order(sizes, [1, 2], 6), 60
    wanted = [straight.rows(step) for step in range(1, steps + 1)]
    assert len({tuple(rows) for rows in wanted}) > 50
    for step in (60, 7, 33, 1, 34):
        assert order(sizes, [1, 2], 6).rows(step) == wanted[step - 1]
        assert straight.rows(step) == wanted[step - 1]
    assert order(sizes, [2, 4], 6).rows(9) == wanted[8]  # the same ratio
    assert order(sizes, [1, 2], 6, seed=4).rows(9) != wanted[8]


@given(st.integers(2, 9), st.integers(1, 8), st.integers(0, 5))
def test_a_step_alone_is_right_where_a_step_takes_most_of_a_source(size: int, weight: int, seed: int) -> None:
    """Rows are then exchanged up to the end of an epoch, and the next one goes by what stands there now."""
    straight = order([size, 50], [weight, 1], weight + 1, seed)
    wanted = [straight.rows(step) for step in range(1, 25)]
    for step in (24, 11, 2):
        assert order([size, 50], [weight, 1], weight + 1, seed).rows(step) == wanted[step - 1]


def test_replacements_are_of_the_same_source_and_come_once_before_any_again() -> None:
    sizes = [8, 6]
    made = order(sizes, [2, 1], 3)
    spares: dict[int, list[int]] = {0: [], 1: []}
    for step in range(1, 3):
        for slot, row in enumerate(made.rows(step)):
            for attempt in (1, 2):
                spare = made.spare(step, attempt, slot, 3)
                assert source_of(sizes, spare) == source_of(sizes, row)
                spares[source_of(sizes, row)].append(spare)
    assert sorted(spares[0]) == list(range(8)) and len(set(spares[1])) == 4
    with pytest.raises(ValueError, match="outside the plan"):
        made.spare(1, 3, 0, 3)


def test_an_epoch_ends_when_every_row_has_come() -> None:
    made = order([30, 10], [3, 1], 4)
    assert made.steps_per_epoch == 10 and made.epoch(5) == 0.5 and made.epoch(10) == 1.0
    uneven = order([30, 100], [3, 1], 4)  # 100 rows at a quarter of the prompts take 400
    assert uneven.steps_per_epoch == 100 and uneven.epoch(100) == 1.0
    assert uneven.epochs(100) == {"epoch": 1.0, "epoch/s0": 10.0, "epoch/s1": 1.0}
    seen = {row for step in range(1, 101) for row in uneven.rows(step)}
    assert seen == set(range(130)) and set(range(130)) - {r for s in range(1, 100) for r in uneven.rows(s)}
    rare = order([1, 1000], [1000, 1], 7)
    assert rare.steps_per_epoch == next(s for s in range(1, 200_000) if rare._dealt(s)[1] >= 1000)


def test_the_sentence_names_shares_rows_and_the_epoch() -> None:
    made = order([3000, 200], [3, 1], 8)
    assert made.sentence == (
        "mixture: s0 75.0% (3,000 rows), s1 25.0% (200 rows); an epoch, in which every row comes at least once, is 500 "
        "steps"
    )
    assert not re.search(r"\d{6}", made.sentence)


def test_what_is_no_mixture() -> None:
    with pytest.raises(ValueError, match="do not agree"):
        order([3, 0], [1, 1], 2)
    with pytest.raises(ValueError, match="steps count from 1"):
        order([3, 3], [1, 1], 2).rows(0)
