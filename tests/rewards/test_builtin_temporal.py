"""temporal_iou: segments in a text, gold segments, and the overlap by hand and by counting."""

from __future__ import annotations

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


@given(segments, segments)
def test_the_overlap_counts_whole_seconds(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    seconds = [{t for start, end in part for t in range(start, end)} for part in (one, other)]
    assert overlap_of(one, other) == len(seconds[0] & seconds[1]) / len(seconds[0] | seconds[1])
    assert overlap_of(one, other) == overlap_of(other, one)
    assert overlap_of(one, one) == 1.0
    assert sum(end - start for start, end in merged(one)) == len(seconds[0])
    if len(other) > 1:
        assert temporal_iou(str([list(s) for s in one]), other) == overlap_of(one, other)


def test_golds_of_any_form() -> None:
    import numpy as np

    assert gold_segments(np.array([[1.0, 2.0], [3.0, 4.5]])) == [(1.0, 2.0), (3.0, 4.5)]
