"""What holds for every way to make advantages, on rewards that hypothesis thinks of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_grpo.algorithm.advantages import Objective, advantages
from mm_grpo.config import AlgorithmConfig

Table = list[list[float | None]]
Estimate = Callable[[Table], list[tuple[float, ...]]]


def with_config(**fields: str) -> Estimate:
    config = AlgorithmConfig(**fields)  # type: ignore[arg-type]
    return lambda rewards: advantages(rewards, config, [Objective(0.5, rewards)])


def of_two(rewards: Table) -> list[tuple[float, ...]]:
    """normalize_then_sum of the rewards and of their squares, which shares no shift with them."""
    squares = [[None if r is None else r * r for r in row] for row in rewards]
    config = AlgorithmConfig(multi_objective_aggregation="normalize_then_sum")
    return advantages(rewards, config, [Objective(1.0, rewards), Objective(-0.25, squares)])


SHIFT_FREE: dict[str, Estimate] = {
    "group": with_config(),
    "none": with_config(scale_rewards="none"),
    "rloo": with_config(advantage_estimator="rloo"),
    "reinforce_plus_plus_baseline": with_config(advantage_estimator="reinforce_plus_plus_baseline"),
    "normalize_then_sum": with_config(multi_objective_aggregation="normalize_then_sum"),
}


def of_squares(rewards: Table) -> list[tuple[float, ...]]:
    """maxrl, which takes no reward below 0."""
    squares = [[None if r is None else r * r for r in row] for row in rewards]
    return with_config(advantage_estimator="maxrl")(squares)


ALL = {**SHIFT_FREE, "batch": with_config(scale_rewards="batch"), "two rewards": of_two, "maxrl": of_squares}

# Eighths are exact in binary: a law that holds on paper then holds to the last digits.
EIGHTHS = st.integers(-80, 80).map(lambda n: n / 8)
GROUP = st.lists(st.one_of(EIGHTHS, st.none()), min_size=2, max_size=6)
TABLE = st.lists(GROUP, min_size=1, max_size=4)

every = pytest.mark.parametrize("name", list(ALL))


def close(got: list[tuple[float, ...]], want: list[tuple[float, ...]]) -> bool:
    return all(a == pytest.approx(b, abs=1e-9) for a, b in zip(got, want, strict=True))


@every
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_the_order_of_completions_does_not_matter(name: str, data: st.DataObject) -> None:
    rewards = data.draw(TABLE)
    orders = [data.draw(st.permutations(range(len(row)))) for row in rewards]
    shuffled = [[row[i] for i in order] for row, order in zip(rewards, orders, strict=True)]
    want = [tuple(row[i] for i in order) for row, order in zip(ALL[name](rewards), orders, strict=True)]
    assert close(ALL[name](shuffled), want)


@every
@settings(deadline=None, max_examples=20)
@given(rewards=TABLE)
def test_a_group_sums_to_zero_and_none_is_zero(name: str, rewards: Table) -> None:
    for row, given_rewards in zip(ALL[name](rewards), rewards, strict=True):
        assert sum(row) == pytest.approx(0.0, abs=1e-9)
        assert all(a == 0.0 for a, r in zip(row, given_rewards, strict=True) if r is None)


@every
@settings(deadline=None, max_examples=20)
@given(rewards=TABLE)
@pytest.mark.field_bug("default-zero")
def test_none_is_as_if_the_completion_were_not_there(name: str, rewards: Table) -> None:
    without = [[r for r in row if r is not None] for row in rewards]
    got = [
        tuple(a for a, r in zip(row, given_rewards, strict=True) if r is not None)
        for row, given_rewards in zip(ALL[name](rewards), rewards, strict=True)
    ]
    assert close(got, ALL[name](list[list[float | None]](without)))


@every
@settings(deadline=None, max_examples=20)
@given(
    value=st.floats(-1e6, 1e6, allow_nan=False),
    holes=st.lists(st.booleans(), min_size=2, max_size=9),
    other=GROUP,
)
def test_equal_rewards_give_exact_zeros_whatever_the_others_do(
    name: str, value: float, holes: list[bool], other: list[float | None]
) -> None:
    equal: list[float | None] = [None if hole else value for hole in holes]
    assert ALL[name]([equal, other])[0] == (0.0,) * len(equal)


@pytest.mark.parametrize("name", list(SHIFT_FREE))
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_group_may_be_shifted(name: str, data: st.DataObject) -> None:
    rewards = data.draw(TABLE)
    shifts = [data.draw(EIGHTHS) for _ in rewards]
    shifted = [[None if r is None else r + by for r in row] for row, by in zip(rewards, shifts, strict=True)]
    assert close(SHIFT_FREE[name](shifted), SHIFT_FREE[name](rewards))
