"""The reward `temporal_iou`: segments of a video, in seconds, and how they are read from a text.

A time is a number of seconds (12.3, 12.3 s) or a clock time (1:05, 0:01:05.5). A segment is a pair of times as models
write them: [3.2, 7.5], 12.3 to 15.6 seconds, 0:12 - 0:15, between 3 and 7, {"start": 3.2, "end": 7.5}. Every repeat
in the patterns is bounded, so that reading takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mm_grpo.rewards.builtins.answers import column_value, final_part
from mm_grpo.rewards.registry import reward

MOST_SEGMENTS = 100
LONGEST = 1e7
"""Seconds; a time beyond it is none."""

Segment = tuple[float, float]

_CLOCK = r"\d{1,3}(?::[0-5]?\d){1,2}(?:\.\d{1,9})?"
_TIME = rf"(?<![\w.:])({_CLOCK}|\d{{1,9}}(?:\.\d{{1,17}})?)(?![\d:]|\.\d)"
_SIGNED = r"(?<![\w.:+-])([-+]?(?:" + _CLOCK + r"|\d{1,9}(?:\.\d{1,17})?))(?![\d:]|\.\d)"
_UNIT = r"(?:\s{0,2}(?:seconds?|secs?|s)\b\.?)?"
_QUOTE = "[\"']?"
_TO = r"\s{0,4}(?:to|until|till|through|->|→|~|-|–|—)\s{0,4}"
_IN_BRACKETS = (
    rf"[\[(<]\s{{0,4}}{_QUOTE}{_SIGNED}{_UNIT}{_QUOTE}(?:\s{{0,4}}[,;]\s{{0,4}}|\s{{1,4}}|{_TO})"
    rf"{_QUOTE}{_SIGNED}{_UNIT}{_QUOTE}\s{{0,4}}[\])>]"
)
_EQUALS = rf"{_QUOTE}\s{{0,3}}[=:]\s{{0,3}}{_QUOTE}"
_NAMED = rf"\bstart\w{{0,10}}{_EQUALS}{_TIME}{_UNIT}{_QUOTE}[\s,;]{{1,4}}{_QUOTE}end\w{{0,10}}{_EQUALS}{_TIME}{_UNIT}"
_BETWEEN = rf"\bbetween\s{{1,4}}{_TIME}{_UNIT}\s{{1,4}}and\s{{1,4}}{_TIME}{_UNIT}"
_WORDS = rf"{_TIME}{_UNIT}{_TO}{_TIME}{_UNIT}"
_SEGMENT = re.compile("|".join((_IN_BRACKETS, _NAMED, _BETWEEN, _WORDS)), re.IGNORECASE)
_BARE = re.compile(
    rf"\s{{0,9}}{_TIME}{_UNIT}(?:\s{{0,4}},\s{{0,4}}|\s{{1,4}}){_TIME}{_UNIT}\s{{0,9}}\.?\s{{0,9}}"
)
_GOLD_TIME = re.compile(rf"\s*({_CLOCK}|\d{{1,9}}(?:\.\d{{1,17}})?)\s*")


@reward("temporal_iou", needs=("segment",))
def temporal_iou(completion: str, segment: Any, *, threshold: float | None = None) -> float | None:
    """Intersection over union of predicted and gold segments of a video, in seconds.

    The gold column is one segment [start, end], or a list of several; times are seconds or clock texts ("1:05"), and
    the whole may be JSON text. Segments are read from the final part (the last `<answer>` block, else what follows
    `</think>`, else everything): [3.2, 7.5], 12.3 to 15.6 seconds, 0:12 - 0:15, between 3 and 7, or nothing but two
    numbers. With one gold segment the last predicted one counts; with several all count, and the time that the
    predicted ones cover together is compared with the time that the gold ones cover. With `threshold` the score is
    1.0 where the overlap reaches it, else 0.0.

    Returns a score in [0, 1], 0.0 when no segment parses, one ends before it starts, or there are more than 100 and
    more than gold has; None when the row has no gold segment. ValueError when a gold segment is no pair of times,
    starts before 0 or does not end after it starts. For Charades-STA, ActivityNet Captions and QVHighlights.

    >>> temporal_iou("<answer>[3, 7]</answer>", segment=[3, 5])
    0.5
    >>> temporal_iou("0:10 to 0:20 and 1:00 to 1:05 seconds", segment=[[10, 20], [60, 65]])
    1.0
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}; it is an overlap in (0, 1]")
    if segment is None:
        return None
    gold = gold_segments(segment)
    found = segments_in(completion)
    if len(gold) == 1:
        found = found[-1:]
    if len(found) > max(MOST_SEGMENTS, len(gold)) or any(start > end for start, end in found):
        return 0.0
    score = overlap_of(found, gold)
    return score if threshold is None else float(score >= threshold - 1e-9)


def segments_in(text: str) -> list[Segment]:
    """All segments in a text's final part, in order, each as (start, end) in seconds; reversed ones as they stand.

    >>> segments_in("from 12.3 s to 15.6 s, and [1:05, 1:10.5]")
    [(12.3, 15.6), (65.0, 70.5)]
    """
    part = final_part(text)
    bare = _BARE.fullmatch(part)
    found = []
    for match in [bare] if bare else _SEGMENT.finditer(part):
        start, end = (_seconds(time) for time in match.groups() if time is not None)
        if max(abs(start), abs(end)) <= LONGEST:
            found.append((start, end))
    return found


def gold_segments(value: Any) -> list[Segment]:
    """The gold segments of a column's value; ValueError when it holds none, or one that is no segment."""
    given, value = value, column_value(value)
    several = isinstance(value, list | tuple) and value and not any(_is_time(one) for one in value)
    segments = list(value) if several else [value]
    return [_gold_segment(one, given) for one in segments]


def _gold_segment(value: Any, given: Any) -> Segment:
    value = value.tolist() if hasattr(value, "tolist") else value
    pair = isinstance(value, list | tuple) and len(value) == 2
    start, end = (_gold_time(time) for time in value) if pair else (None, None)
    if start is None or end is None:
        raise ValueError(
            f"the gold segment is {str(given)[:80]}; it must be [start, end] in seconds (or as '1:05'), or a list of "
            f"such pairs, with times from 0 to {LONGEST:.0f}"
        )
    if not start < end:
        raise ValueError(f"the gold segment [{start:g}, {end:g}] does not end after it starts")
    return start, end


def _is_time(value: Any) -> bool:
    return isinstance(value, str | int | float) or value is None


def _gold_time(value: Any) -> float | None:
    """Seconds from 0 to LONGEST; None for what is no time."""
    if isinstance(value, str) and _GOLD_TIME.fullmatch(value):
        value = _seconds(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
        return None
    return float(value)


def _seconds(time: str) -> float:
    seconds, sign = 0.0, -1.0 if time.startswith("-") else 1.0
    for part in time.lstrip("+-").split(":"):
        seconds = 60 * seconds + float(part)
    return sign * seconds


def overlap_of(one: Sequence[Segment], other: Sequence[Segment]) -> float:
    """The time that both cover divided by the time that either covers, in [0, 1]; 0 when neither covers any.

    >>> overlap_of([(0, 4), (2, 6)], [(3, 9)])
    0.3333333333333333
    """
    covered, others = merged(one), merged(other)
    shared, i, j = 0.0, 0, 0
    while i < len(covered) and j < len(others):
        shared += max(0.0, min(covered[i][1], others[j][1]) - max(covered[i][0], others[j][0]))
        if covered[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    union = sum(end - start for start, end in covered) + sum(end - start for start, end in others) - shared
    return min(1.0, shared / union) if union > 0 else 0.0


def merged(segments: Sequence[Segment]) -> list[Segment]:
    """The same time as segments that do not overlap, sorted.

    >>> merged([(5, 9), (0, 2), (1, 3)])
    [(0, 3), (5, 9)]
    """
    found: list[Segment] = []
    for start, end in sorted(segments):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
