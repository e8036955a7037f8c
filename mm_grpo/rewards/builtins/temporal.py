"""The reward `temporal_iou`, and how an interval of time is read from a text and from a gold column."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal

from mm_grpo.rewards.builtins.answers import check_choice, column_value, final_part
from mm_grpo.rewards.builtins.boxes import iou_of, is_coordinate
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from mm_grpo.types import Sample

Interval = tuple[float, float]
Space = Literal["seconds", "normalized"]

_OUTSIDE = 0.1  # a gold interval that leaves its video by more than this share is in another space

_N = r"(?:\d{1,9}(?:\.\d{0,17})?|\.\d{1,17})"
_CLOCK, _UNIT = r"\d{1,3}:(?:[0-5]\d:)?[0-5]\d(?:\.\d{1,17})?", r"(?:\s?s(?:ec(?:ond)?s?)?\b)?"
_END = r"(?![\w:%]|\.\d|\s?(?:%|s|secs?|seconds?|m|min\w*|h|hours?|frames?)(?!\w))"
_TIMES = {"seconds": rf"({_CLOCK}|{_N}{_UNIT}){_END}", "normalized": f"({_N}){_END}"}
# TIME stands for a time. Every repeat is bounded, so that a search takes linear time.
_FORMS = r"""
    [\[(] \s{0,4} ["']? TIME ["']? \s{0,4} , \s{0,4} ["']? TIME ["']? \s{0,4} [\])]
    | \A \s{0,9} TIME (?: , \s{0,4} | \s{1,4} ) TIME [\s.]{0,9} \Z
    | \b start [^\d.\n-]{0,24}? TIME [^\d.\n-]{0,24}? \b end [^\d.\n-]{0,24}? TIME
    | \b between \s{1,4} TIME \s{1,4} and \s{1,4} TIME
    | (?<![\w.:/-]) TIME [\s*>]{0,4} (?: - | – | — | ~ | → | -> | \bto\b | \buntil\b ) [\s*<]{0,4} TIME
"""
_PATTERNS = {
    space: re.compile(_FORMS.replace("TIME", time), re.VERBOSE | re.ASCII | re.IGNORECASE)
    for space, time in _TIMES.items()
}


@reward("temporal_iou", needs=("interval",))
def temporal_iou(
    completion: str,
    interval: Any,
    sample: Sample | None = None,
    *,
    space: Space = "seconds",
    gold_space: Space = "seconds",
) -> float | None:
    """Intersection over union of the completion's interval of time and the gold interval.

    `space` is the space of the model's times, `gold_space` of the gold ones: "seconds" from the beginning of the file,
    or "normalized" (0 to 1, of the video as it is shown). They are converted by the times of the row's video. The gold
    is [start, end], or a list of one such pair.

    An interval is read from the final part (the last `<answer>` block, else what follows `</think>`, else everything),
    as [3.5, 8], 3.5 8, {"start": 3.5, "end": 8}, 3.5s - 8s, 3.5 to 8 seconds, between 3.5 and 8, starts at 3.5 and
    ends at 8. Seconds may be 0:03.5 or 1:02:03. Two different intervals are no answer.

    Returns a score in [0, 1], 0.0 when no interval parses or it does not end after its start; None when the row has no
    gold interval. ValueError when the gold does not end after its start or does not lie in its video, or the spaces
    differ in a row without one video. For Charades-STA, ActivityNet Captions, QVHighlights with one window.

    >>> temporal_iou("<answer>From 0:02 to 0:08</answer>", interval=[5, 10])
    0.375
    """
    check_choice("space", space, *_TIMES)
    check_choice("gold_space", gold_space, *_TIMES)
    if interval is None:
        return None
    gold, predictions = gold_interval(interval, sample, space, gold_space), intervals_in(completion, space)
    if len(predictions) != 1:
        return 0.0
    (start, end), (gold_start, gold_end) = predictions[0], gold
    return iou_of((start, 0, end, 1), (gold_start, 0, gold_end, 1))


def gold_interval(
    value: Any, sample: Sample | None, space: Space = "seconds", gold_space: Space = "seconds"
) -> Interval:
    """Return the gold interval of a column in the model's space. ValueError if it is none or not in its video."""
    items = column_value(value)
    items = items[0] if isinstance(items, list | tuple) and len(items) == 1 else items
    is_pair = isinstance(items, list | tuple) and len(items) == 2 and all(map(is_coordinate, items))
    if not is_pair or items[0] >= items[1]:
        raise ValueError(
            f"the gold interval is {str(value)[:80]}; it must be one pair of times, the start before the end"
        )
    (low, high), (first, last) = _extent(gold_space, sample), _extent(space, sample)
    margin = _OUTSIDE * (high - low) if high < math.inf else 0
    if items[0] < low - margin or items[1] > high + margin:
        raise ValueError(
            f"the gold interval {items} does not lie in its video, which is from {low:g} to {high:g} in the space "
            f"{gold_space!r}; see the option gold_space"
        )
    if space == gold_space:
        return items[0], items[1]
    if math.inf in (high, last):
        raise ValueError(
            f"gold_space {gold_space!r} is not space {space!r}, and the row has not one video to convert by"
        )
    start, end = (first + (time - low) * (last - first) / (high - low) for time in items)
    return start, end


def _extent(space: Space, sample: Sample | None) -> Interval:
    """Return the beginning and the end of the row's video; infinity if they are not known."""
    if space == "normalized":
        return 0.0, 1.0
    if sample is None or len(sample.videos) != 1:
        return 0.0, math.inf
    (video,) = sample.videos
    # a last frame that fills a pair has the time of the frame before it
    return video.times[0], video.times[0] + len({*video.times}) / video.fps


def intervals_in(text: str, space: Space = "seconds") -> list[Interval]:
    """Return the different intervals in a text's final part, in order.

    >>> intervals_in('{"start": "1:02:03", "end": "1:02:04.5"}'), intervals_in("from 5 to 10 minutes")
    ([(3723.0, 3724.5)], [])
    """
    intervals: dict[Interval, None] = {}
    for match in _PATTERNS[space].finditer(final_part(text)):
        start, end = (_seconds(time) for time in match.groups() if time)
        intervals[start, end] = None
    return [*intervals]


def _seconds(time: str) -> float:
    parts = re.findall(r"[\d.]+", time)[::-1]
    return sum(float(part) * 60.0**place for place, part in enumerate(parts))
