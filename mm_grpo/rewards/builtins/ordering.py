"""The reward `ordering`: the items of a list in the right order, and how such a list is read from a text.

A text lists items in a bracket ([B, A, C], ["b", "a"]), as numbered lines or bullets, on one line between arrows or
commas, or, where all items are single characters, as one word (BAC).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from mm_grpo.rewards.builtins.answers import (
    boxed,
    check_choice,
    column_value,
    final_part,
    gold_texts,
    normalise,
)
from mm_grpo.rewards.registry import reward

_MARK = re.compile(r"[ \t]{0,9}(?:\(?\d{1,4}[.):]|[-*•])[ \t]{1,9}(?=\S)")
_SEPARATORS = (
    re.compile(r"\s{0,4}(?:->|=>|→|>)\s{0,4}"),
    re.compile(r"\s{0,4};\s{0,4}"),
    re.compile(r"\s{0,4}[,，、]\s{0,4}"),
)


@reward("ordering", needs=("order",))
def ordering(
    completion: str, order: str | Sequence[Any] | None, *, metric: Literal["pairs", "exact"] = "pairs"
) -> float | None:
    """Agreement of the completion's order of the gold items with the gold order.

    The gold column is a list of at least two different items, or text that lists them
    (JSON, or "B, A, C"). The completion's list is read from the last
    `\\boxed{...}` of its final part (the last `<answer>` block, else what follows `</think>`, else everything), else
    from the final part: in it the last bracket, else numbered lines or bullets, else the last line, split at arrows,
    semicolons or commas and without what stands before a colon. Items are compared without case, and without the
    quotes and full stop around them.

    Metric "pairs": of all pairs of items the share that stands in the gold order, which is (tau + 1) / 2 with Kendall's
    tau; the reversed order scores 0 and a random one 0.5 on average. A missing item loses its pairs. An item that gold
    does not have, or that comes again, counts as one more item none of whose pairs is right. Metric "exact": 1.0 for
    the gold list itself, else 0.0.

    Returns a score in [0, 1], 0.0 when no list of two items is found; None when the row has no gold order. ValueError
    when the gold order has fewer than two items or one twice, or the metric means nothing. For jigsaws, steps of a
    task, shuffled frames of a video and ranked images.

    >>> ordering("<answer>B, A, C</answer>", order=["A", "B", "C"])
    0.6666666666666666
    >>> ordering("1. wash\\n2. cut\\n3. cook", order=["wash", "cut", "cook"], metric="exact")
    1.0
    """
    check_choice("metric", metric, "pairs", "exact")
    if order is None:
        return None
    gold = [normalise(item) for item in gold_order(order)]
    found = [normalise(item) for item in listed_items(completion, gold)]
    return float(found == gold) if metric == "exact" else share_of_pairs(found, gold)


def share_of_pairs(found: Sequence[str], gold: Sequence[str]) -> float:
    """Pairs of gold items that `found` has in gold's order, divided by all pairs of the gold items and of what
    `found` has beyond them.

    >>> share_of_pairs(["b", "c"], ["a", "b", "c"]), share_of_pairs(["a", "b", "b"], ["a", "b"])
    (0.3333333333333333, 0.3333333333333333)
    """
    place: dict[str, int] = {}
    for at, item in enumerate(found):
        place.setdefault(item, at)
    places = [place[item] for item in gold if item in place]
    right = sum(one < other for one, other in itertools.combinations(places, 2))
    count = len(gold) + len(found) - len(places)
    return right / (count * (count - 1) // 2)


def gold_order(value: Any) -> list[str]:
    """The items of a gold column as texts; ValueError unless there are at least two different ones."""
    items = column_value(value)
    if isinstance(value, str) and not isinstance(items, list):
        items = _one_line(value, ())
    items = items if isinstance(items, list | tuple) else []
    legal = all(isinstance(item, str | int | float) for item in items)
    texts = gold_texts(items) if legal else []
    if len(texts) < max(2, len(items)) or len({normalise(text) for text in texts}) < len(texts):
        raise ValueError(
            f'the gold order is {str(value)[:80]!r}; it must be a list of at least two different items, as ["wash", '
            '"cut"] or "wash, cut"'
        )
    return texts


def listed_items(text: str, gold: Sequence[str]) -> list[str]:
    """The items that a completion lists, in its order; `gold` says what separates none, and whether letters do.

    >>> listed_items("The order is: B -> A -> C.", ["a", "b", "c"])
    ['B', 'A', 'C.']
    """
    part = final_part(text)
    inner = boxed(part)
    part = part if inner is None else inner
    close = part.rfind("]")
    last = part.rfind("[", 0, max(close, 0))
    for start in (part.find("["), last) if last >= 0 else ():  # an item may hold a bracket
        with suppress(ValueError, RecursionError):  # RecursionError: 100,000 opening brackets
            return gold_texts(json.loads(part[start : close + 1]))
    if last >= 0:
        return _one_line(part[last + 1 : close], gold)
    lines = [line.strip() for line in part.splitlines() if line.strip()]
    marked = [line[match.end() :] for line in lines if (match := _MARK.match(line))]
    if len(marked) > 1 or not lines:
        return marked
    return _one_line(lines[-1] if any(": " in item for item in gold) else lines[-1].rpartition(": ")[2], gold)


def _one_line(line: str, gold: Sequence[str]) -> list[str]:
    """The items on a line; none without a separator."""
    for separator in _SEPARATORS:
        # what occurs in an item separates none
        if not any(separator.search(f" {item} ") for item in gold) and separator.search(line):
            return [item.removeprefix("and ") for item in separator.split(line.strip()) if item]
    words = line.split()
    run = words[-1].rstrip(".") if words else ""
    if gold and len(run) > 1 and all(len(item) == 1 for item in gold):
        return list(run)
    return words if all(" " not in item for item in gold) and len(words) >= len(gold) else []
