"""temporal_iou: segments in a text, gold segments, and the overlap by hand and by counting."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards.builtins.temporal import gold_segments, merged, overlap_of, segments_in, temporal_iou

whole = st.integers(0, 40)
segment = st.lists(whole, min_size=2, max_size=2, unique=True).map(lambda pair: tuple(sorted(pair)))
segments = st.lists(segment, min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("0:12 - 0:15", [(12, 15)]),
        ("1:02:03.5 – 1:02:10", [(3723.5, 3730)]),
        ('{"start": 3.2, "end": 7.5}', [(3.2, 7.5)]),
        ("3.2, 7.5", [(3.2, 7.5)]),
        ("(1, 2) and (3, 4)", [(1, 2), (3, 4)]),
        ("<think>[1, 2]</think> [3, 4]", [(3, 4)]),
        ("[-1, 5]", [(-1, 5)]),
        ("[1, 1e99]", []),
    ],
)
def test_segments_in_a_text(text: str, found: list[tuple[float, float]]) -> None:
    assert segments_in(text) == found


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [
        ("[2, 6]", [2, 6], 1.0),
        ("[2, 4]", [2, 6], 0.5),
        ("nowhere", [2, 6], 0.0),
        ("[2, 6] or [9, 10]", [2, 6], 0.0),
        ("0:02 to 0:06", ["0:02", "0:06"], 1.0),
        ("[2, 6]", "[2, 6]", 1.0),
        ("[0, 2] [0, 2] [4, 6]", [[0, 2], [4, 6]], 1.0),  # time is covered once
        ("[0, 2] [4, 6] [6, 10]", [[0, 2], [4, 6]], 0.5),
        ("[0, 2] [6, 4]", [[0, 2], [4, 6]], 0.0),  # one ends before it starts
    ],
)
def test_scores_by_hand(completion: str, gold: Any, score: float) -> None:
    assert temporal_iou(completion, gold) == pytest.approx(score)
    assert temporal_iou(completion, gold, threshold=0.5) == float(score >= 0.5)


def test_too_many_segments_win_nothing() -> None:
    gold = [[0, 2], [4, 6]]
    assert temporal_iou("[0, 2] [4, 6] " * 50, gold) == 1.0
    assert temporal_iou("[0, 2] [4, 6] " * 51, gold) == 0.0
    assert temporal_iou("0 to 2 " * 10_000, gold) == 0.0
    many = [[2 * i, 2 * i + 1] for i in range(150)]
    assert temporal_iou(str(many), many) == 1.0


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ([6, 2], r"the gold segment \[6, 2\] does not end after it starts"),
        ([2, 2], r"the gold segment \[2, 2\] does not end after it starts"),
        ([-1, 2], r"the gold segment is \[-1, 2\]; it must be \[start, end\] in seconds"),
        ([1, math.inf], "it must be"),
        ([1, 10**400], "it must be"),
        ([1, 2, 3], "it must be"),
        ([], "it must be"),
        ("3 to 7", "the gold segment is 3 to 7; it must be"),
        ("[" * 100_000, "it must be"),
    ],
)
def test_golds_that_mean_nothing(gold: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        temporal_iou("[1, 2]", gold)


def test_no_gold_and_a_threshold_that_means_nothing() -> None:
    assert temporal_iou("[1, 2]", None) is None
    with pytest.raises(ValueError, match=r"threshold=1.5; it is an overlap in \(0, 1\]"):
        temporal_iou("[1, 2]", [1, 2], threshold=1.5)


@given(segments, segments)
def test_the_overlap_counts_whole_seconds(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    seconds = [{t for start, end in part for t in range(start, end)} for part in (one, other)]
    assert overlap_of(one, other) == len(seconds[0] & seconds[1]) / len(seconds[0] | seconds[1])
    assert overlap_of(one, other) == overlap_of(other, one)
    assert overlap_of(one, one) == 1.0
    assert sum(end - start for start, end in merged(one)) == len(seconds[0])
    if len(other) > 1:
        assert temporal_iou(str([list(s) for s in one]), other) == overlap_of(one, other)


@given(st.text() | st.lists(st.floats() | st.text(max_size=3)).map(str))
def test_any_text_is_scored(text: str) -> None:
    score = temporal_iou(text, [[1, 2], [3, 4]])
    assert score is not None and 0 <= score <= 1


def test_arrays() -> None:
    import numpy as np

    assert gold_segments(np.array([[1.0, 2.0], [3.0, 4.5]])) == [(1.0, 2.0), (3.0, 4.5)]
