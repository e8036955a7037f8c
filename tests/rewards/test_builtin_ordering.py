"""ordering: lists in a text, gold orders, and pairs counted by hand and one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards.builtins.ordering import gold_order, listed_items, ordering, share_of_pairs

ABC = ["A", "B", "C"]
STEPS = ["wash", "cut finely", "cook"]


@pytest.mark.parametrize(
    ("text", "gold", "found"),
    [
        ("", ["a", "b"], []),
        ("The order is: B, A, and C", ["a", "b", "c"], ["B", "A", "C"]),
        ("The order is BAC.", ["a", "b", "c"], ["B", "A", "C"]),
        ("3 1 2", ["1", "2", "3"], ["3", "1", "2"]),
        ('["a [1]", "b"]', ["a [1]", "b"], ["a [1]", "b"]),
        ("[B, A]", ["a", "b"], ["B", "A"]),
        ("wash\ncook", ["wash", "cook"], ["wash", "cook"]),
        (r"so \boxed{B, A}", ["a", "b"], ["B", "A"]),
        ("<think>A, B</think> B, A", ["a", "b"], ["B", "A"]),
        ("wash", ["wash", "cook"], []),
    ],
)
def test_lists_in_a_text(text: str, gold: list[str], found: list[str]) -> None:
    assert listed_items(text, gold) == found


@pytest.mark.parametrize(
    ("completion", "pairs", "exact"),
    [
        ("a, b, c.", 1.0, 1.0),
        ("B, A, C", 2 / 3, 0.0),
        ("C, A, B", 1 / 3, 0.0),
        ("C, B, A", 0.0, 0.0),
        ("A, C", 1 / 3, 0.0),  # AC of AB, AC, BC
        ("A, B, C, D", 0.5, 0.0),  # 3 of 6
        ("A, B, C, C", 0.5, 0.0),
    ],
)
def test_scores_by_hand(completion: str, pairs: float, exact: float) -> None:
    assert ordering(completion, ABC) == pytest.approx(pairs)
    assert ordering(completion, ABC, metric="exact") == exact


def test_case_and_items_of_several_words() -> None:
    assert ordering("1. Wash\n2. Cut finely.\n3. Cook", STEPS, metric="exact") == 1.0
    assert ordering("1. Wash\n2. Cut finely.\n3. Cook", STEPS, ignore_case=False) == 0.0
    assert ordering("cut finely -> wash -> cook", STEPS) == pytest.approx(2 / 3)


def test_golds_as_text_and_numbers() -> None:
    assert ordering("A, B", None) is None
    assert gold_order('["a", 2, 3.0]') == ["a", "2", "3"]
    assert gold_order("B, A, C") == gold_order("BAC") == gold_order("B A C") == ["B", "A", "C"]
    assert gold_order("wash\ncut, then stir") == ["wash", "cut, then stir"]
    assert ordering("[3, 1, 2]", [3.0, 1.0, 2.0], metric="exact") == 1.0


@given(st.lists(st.sampled_from("abcdefg"), max_size=9), st.integers(2, 5))
def test_the_share_counts_every_pair(found: list[str], size: int) -> None:
    gold = list("abcde"[:size])
    first = {item: found.index(item) for item in gold if item in found}
    right = sum(a in first and b in first and first[a] < first[b] for a, b in itertools.combinations(gold, 2))
    count = size + len(found) - len(first)
    assert share_of_pairs(found, gold) == right / (count * (count - 1) / 2)
