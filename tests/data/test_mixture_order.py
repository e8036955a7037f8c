"""The order of a mixture: shares within one prompt, every row once a pass, and a pure function."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mm_grpo.data.mixture_order import MixtureOrder, Turns


def order(
    sizes: list[int], weights: list[float], prompts: int, seed: int = 3, shuffle: bool = True
) -> MixtureOrder:
    return MixtureOrder(sizes, weights, [f"s{i}" for i in range(len(sizes))], prompts, seed, shuffle)


def source_of(sizes: list[int], row: int) -> int:
    return next(i for i in range(len(sizes)) if row < sum(sizes[: i + 1]))


def test_three_to_one_by_hand() -> None:
    made = order([10, 10], [3, 1], 4, shuffle=False)
    # the first source has 3/4, 6/4 and 9/4 of a prompt due, and the second at 3/4 lags by half a prompt or more
    assert made.rows(1) == [0, 1, 10, 2] and made.rows(2) == [3, 4, 11, 5]
    assert made.rows(4) == [9, 0, 13, 1]  # the first source begins again


@example([10, *[1] * 8])  # earliest first alone is a whole prompt off
@example([175, 34, 13, 1, 84, 11, 173, 3])  # and so, by more, is the one that lags most
@settings(max_examples=20)
@given(st.lists(st.integers(1, 30) | st.integers(1, 200), min_size=1, max_size=9))
def test_no_source_is_ever_a_prompt_off_its_share(weights: list[int]) -> None:
    turns, total = Turns(weights), sum(weights)
    bound = 1 - 1 / max(2, 2 * len(weights) - 2)  # that of the paper
    counts = [0] * len(weights)
    for position in range(total):
        source, draw = turns.place(position)
        assert draw == counts[source]
        counts[source] += 1
        asked = position + 1
        assert asked % 50 or turns.counts(asked) == counts
        assert all(abs(c - w * asked / total) <= bound + 1e-9 for c, w in zip(counts, weights, strict=True))
    assert counts == weights
    later = 7 * total + total // 2  # the turns begin again, and need not be made one by one
    source, draw = Turns(weights).place(later)
    assert (source, draw - 7 * weights[source]) == turns.place(total // 2)
    half = turns.counts(total // 2)
    assert Turns(weights).counts(later) == [7 * w + c for w, c in zip(weights, half, strict=True)]


def test_steps_hold_exact_shares_in_an_order_that_strides_do_not_alias() -> None:
    sizes = [400, 300, 200]
    made = order(sizes, [2, 1, 1], 8)
    first_half: Counter[int] = Counter()
    for step in range(1, 101):
        rows = made.rows(step)
        assert Counter(source_of(sizes, row) for row in rows) == {0: 4, 1: 2, 2: 2}
        first_half.update(source_of(sizes, row) for row in rows[0::2])  # what the first of two processes gets
    assert abs(first_half[0] - 200) < 40 and min(first_half.values()) > 60


def test_a_later_step_alone_is_the_step_of_a_whole_run() -> None:
    sizes = [3, 2]
    straight, steps = order(sizes, [1, 2], 6), 60
    wanted = [straight.rows(step) for step in range(1, steps + 1)]
    assert len({tuple(rows) for rows in wanted}) > 50
    for step in (60, 7, 33, 1, 34):
        assert order(sizes, [1, 2], 6).rows(step) == wanted[step - 1]
        assert straight.rows(step) == wanted[step - 1]
    assert order(sizes, [2, 4], 6).rows(9) == wanted[8]  # the same ratio
    assert order(sizes, [1, 2], 6, seed=4).rows(9) != wanted[8]


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


def test_an_epoch_ends_when_every_row_has_come() -> None:
    made = order([30, 10], [3, 1], 4)
    assert made.steps_per_epoch == 10 and made.epochs(5) == {"epoch": 0.5, "epoch/s0": 0.5, "epoch/s1": 0.5}
    uneven = order([30, 100], [3, 1], 4)  # 100 rows at a quarter of the prompts take 400
    assert uneven.steps_per_epoch == 100
    assert uneven.epochs(100) == {"epoch": 1.0, "epoch/s0": 10.0, "epoch/s1": 1.0}
    seen = {row for step in range(1, 101) for row in uneven.rows(step)}
    assert seen == set(range(130)) and set(range(130)) - {r for s in range(1, 100) for r in uneven.rows(s)}
    assert order([1, 1000], [1000, 1], 7).steps_per_epoch == 143000  # 1000 times 1001 prompts, by 7
    sentence = order([3000, 200], [3, 1], 8).sentence(250)
    assert all(word in sentence for word in ("s0 75.0% (3,000 rows)", "s1 25.0% (200 rows)", "0.5 epochs"))


def test_the_order_is_pinned() -> None:
    # A change of these numbers changes every run that resumes.
    made = order([5, 3], [2, 1], 6)
    assert [made.rows(1), made.rows(2)] == [[5, 1, 6, 3, 4, 0], [1, 7, 0, 5, 2, 2]]
    assert [made.spare(1, 1, slot, 2) for slot in range(6)] == [5, 0, 6, 1, 3, 4]
