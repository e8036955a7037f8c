"""The reward `ordering`: the items of a list in the right order, and how such a list is read from a text.

A text lists items in a bracket ([B, A, C], ["b", "a"]), as numbered lines or bullets, on one line between arrows or
commas, one a line, or, where all items are single characters, as one word (BAC).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Literal

from mm_grpo.rewards.builtins.answers import boxed, check_choice, column_value, final_part, normalise
from mm_grpo.rewards.registry import reward

_MARK = re.compile(r"[ \t]{0,9}(?:\(?\d{1,4}[.):]|[-*•])[ \t]{1,9}(?=\S)")
_SEPARATORS = (
    re.compile(r"\s{0,4}(?:->|=>|→|⇒|≻|>)\s{0,4}"),
    re.compile(r"\s{0,4}[;|]\s{0,4}"),
    re.compile(r"\s{0,4}[,，、]\s{0,4}"),
    re.compile(r"\s{1,4}then\s{1,4}", re.IGNORECASE),
)
_LINK = re.compile(r"(?:and then|and|then)\s{1,4}", re.IGNORECASE)
_TRIES = 20  # opening brackets that are tried as the start of a JSON list
_RUN = re.compile(r"[A-Z0-9]{2,}")


@reward("ordering", needs=("order",))
def ordering(
    completion: str,
    order: str | Sequence[str | int | float] | None,
    *,
    metric: Literal["pairs", "exact"] = "pairs",
    ignore_case: bool = True,
) -> float | None:
    """Agreement of the completion's order of the gold items with the gold order.

    The gold column is a list of at least two different items, or text that lists them (JSON, or "B, A, C"). The
    completion's list is read from the last `\\boxed{...}` of its final part (the last `<answer>` block, else what
    follows `</think>`, else everything), else from the final part: in it the last bracket, else numbered lines or
    bullets, else the last line, split at arrows, semicolons, commas or "then" and without what stands before a
    colon; else one item a line. Items are compared without the quotes and full stop around them.

    Metric "pairs": of all pairs of items the share that stands in the gold order, which is (tau + 1) / 2 with Kendall's
    tau; the reversed order scores 0 and a random one 0.5 on average. A missing item loses its pairs. An item that gold
    does not have, or that comes again, counts as one more item none of whose pairs is right. Metric "exact": 1.0 for
    the gold list itself, else 0.0.

    Returns a score in [0, 1], 0.0 when no list of two items is found; None when the row has no gold order. ValueError
    when the gold order has fewer than two items or one twice, or the metric means nothing. For steps of a task,
    shuffled frames of a video and ranked images.

    >>> ordering("<answer>B, A, C</answer>", order=["A", "B", "C"])
    0.6666666666666666
    >>> ordering("1. wash\\n2. cut\\n3. cook", order="wash, cut, cook", metric="exact")
    1.0
    """
    check_choice("metric", metric, "pairs", "exact")
    if order is None:
        return None
    gold = [normalise(item, ignore_case=ignore_case) for item in gold_order(order)]
    if len(set(gold)) < len(gold):
        twice = next(item for item in gold if gold.count(item) > 1)
        raise ValueError(f"the gold order has {twice[:80]!r} twice; it must name each item once")
    found = [normalise(item, ignore_case=ignore_case) for item in listed_items(completion, gold)]
    if metric == "exact":
        return float(found == gold)
    return share_of_pairs(found, gold)


def share_of_pairs(found: Sequence[str], gold: Sequence[str]) -> float:
    """Pairs of gold items that `found` has in gold's order, divided by all pairs of the gold items and of what
    `found` has beyond them.

    >>> share_of_pairs(["b", "c"], ["a", "b", "c"]), share_of_pairs(["a", "b", "b"], ["a", "b"])
    (0.3333333333333333, 0.3333333333333333)
    """
    place = {item: at for at, item in enumerate(gold)}
    before: list[int] = []
    right = surplus = 0
    seen: set[int] = set()
    for item in found:
        at = place.get(item)
        if at is None or at in seen:
            surplus += 1
            continue
        seen.add(at)
        right += bisect_left(before, at)
        insort(before, at)
    count = len(gold) + surplus
    return right / (count * (count - 1) // 2)


def gold_order(value: Any) -> list[str]:
    """The items of a gold column as texts; ValueError unless there are at least two, none of them blank."""
    given = value
    value = _gold_text_items(value) if isinstance(value, str) else column_value(value)
    items = list(value) if isinstance(value, list | tuple) else []
    legal = all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items)
    texts = [_as_text(item) for item in items] if legal else []
    if len(texts) < 2 or not all(text.strip() for text in texts):
        raise ValueError(
            f"the gold order is {str(given)[:80]!r}; it must be a list of at least two items, as "
            '["wash", "cut"] or "wash, cut", of which each is text or a number'
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
    bracket = _last_bracket(part, gold)
    if bracket is not None:
        return bracket
    lines = [line.strip() for line in part.splitlines() if line.strip()]
    marked = [line[match.end() :] for line in lines if (match := _MARK.match(line))]
    if len(marked) > 1:
        return marked
    if not lines:
        return []
    return _one_line(lines[-1], gold) or (lines if len(lines) > 1 else [])


def _last_bracket(text: str, gold: Sequence[str]) -> list[str] | None:
    """The items of the JSON list that the text's last closing bracket ends, else of what that bracket holds; None
    without one."""
    close = text.rfind("]")
    start = nearest = text.rfind("[", 0, max(close, 0))
    for _ in range(_TRIES):
        if start < 0:
            break
        try:
            return [_as_text(item) for item in json.loads(text[start : close + 1])]
        except (ValueError, RecursionError):  # an item may hold a bracket
            start = text.rfind("[", 0, start)
    return _one_line(text[nearest + 1 : close], gold, whole=True) if nearest >= 0 else None


def _one_line(line: str, gold: Sequence[str], *, whole: bool = False) -> list[str]:
    """The items on a line, none without a separator; `whole` says that nothing but items stands on it."""
    start = line.rfind(": ")
    if start >= 0 and not whole and not any(": " in item for item in gold):
        line = line[start + 2 :]
    for separator in _SEPARATORS:
        # what occurs in an item separates none
        if not any(separator.search(f" {item} ") for item in gold) and separator.search(line):
            items = (_LINK.sub("", item.strip(), count=1) for item in separator.split(line))
            return [item for item in items if item]
    words = line.split()
    run = words[-1].rstrip(".") if words else ""
    letters = bool(gold) and all(len(item) == 1 for item in gold)
    if letters and len(run) > 1 and (len(words) == 1 or set(run.casefold()) <= set(gold)):
        return list(run)
    enough = len(words) > 1 and (whole or len(words) >= len(gold))
    return words if enough and all(" " not in item for item in gold) else []


def _gold_text_items(text: str) -> list[Any]:
    value = column_value(text)
    if isinstance(value, list):
        return value
    run = text.strip()
    if _RUN.fullmatch(run):
        return list(run)
    lines = [line.strip() for line in run.splitlines() if line.strip()]
    return lines if len(lines) > 1 else _one_line(run, (), whole=True)


def _as_text(item: Any) -> str:
    """An item as text; a whole float as an integer, for a column of integers with gaps arrives as floats."""
    if isinstance(item, float) and item.is_integer():
        return str(int(item))
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str)
