"""ordering: lists in a text, gold orders, and pairs counted by hand and one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards.builtins.ordering import gold_order, listed_items, ordering, share_of_pairs


@pytest.mark.parametrize(
    ("text", "gold", "found"),
    [
        ("", ["a", "b"], []),
        ("The order is: B, A, and C", ["a", "b", "c"], ["B", "A", "C"]),
        ("The order is BAC.", ["a", "b", "c"], ["B", "A", "C"]),
        ("3 1 2", ["1", "2", "3"], ["3", "1", "2"]),
        ('["a [1]", "b"]', ["a [1]", "b"], ["a [1]", "b"]),
        ("[B, A]", ["a", "b"], ["B", "A"]),
        (r"so \boxed{B, A}", ["a", "b"], ["B", "A"]),
        ("<think>A, B</think> B, A", ["a", "b"], ["B", "A"]),
        ("wash", ["wash", "cook"], []),
    ],
)
def test_lists_in_a_text(text: str, gold: list[str], found: list[str]) -> None:
    assert listed_items(text, gold) == found


def test_golds_as_text_and_numbers() -> None:
    assert ordering("A, B", None) is None
    assert gold_order('["a", 2, 3.0]') == ["a", "2", "3"]
    assert gold_order("B, A, C") == gold_order("B A C") == ["B", "A", "C"]
    assert ordering("[3, 1, 2]", [3.0, 1.0, 2.0], metric="exact") == 1.0


@given(st.lists(st.sampled_from("abcdefg"), max_size=9), st.integers(2, 5))
def test_the_share_counts_every_pair(found: list[str], size: int) -> None:
    gold = list("abcde"[:size])
    first = {item: found.index(item) for item in gold if item in found}
    right = sum(a in first and b in first and first[a] < first[b] for a, b in itertools.combinations(gold, 2))
    count = size + len(found) - len(first)
    assert share_of_pairs(found, gold) == right / (count * (count - 1) / 2)
