"""What is a score: a finite number, or None where a reward does not apply; anything else is described, never replaced.

Trainer and workers check answers by the same functions, so an isolated reward scores as it would without.
"""

from __future__ import annotations

import inspect
import math
import numbers
from typing import Any, Literal

LEGAL = "legal is a finite number, or None where the reward does not apply"


Checked = float | None | str
"""A score, None, or why an answer is no score."""


def score_of(value: Any) -> float | None:
    """A score as float or None; the message of the ValueError is what is wrong with it."""
    if value is None:
        return None
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if inspect.iscoroutine(value):
        value.close()
        raise ValueError("a coroutine that nobody awaits; write the function with `async def`")
    if not isinstance(value, numbers.Real):  # bool counts as 0 or 1
        raise ValueError(f"a {type(value).__name__}")
    try:
        score = float(value)
    except OverflowError:
        raise ValueError("which no float can hold") from None
    if not math.isfinite(score):
        raise ValueError("which is not finite")
    return score


def scores_of(answer: Any, kind: Literal["completion", "batch"], n: int) -> list[Checked]:
    """A function's answer as n checked scores; ValueError when a batch's is no list of n."""
    values = [answer] if kind == "completion" else _list(answer, n)
    checked: list[Checked] = []
    for value in values:
        try:
            checked.append(score_of(value))
        except ValueError as error:
            checked.append(f"returned {shown(value)}, {error}; {LEGAL}")
    return checked


def shown(value: Any, limit: int = 80) -> str:
    """A value's repr on one line, cut at `limit`; a text that was cut has its full length behind it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value)} characters)"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _list(answer: Any, n: int) -> list[Any]:
    if getattr(answer, "ndim", None) == 1 and hasattr(answer, "tolist"):  # a numpy array, a torch tensor
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise ValueError(f"returned {shown(answer)}; legal is a list of {n} numbers or None")
    if len(answer) != n:
        raise ValueError(
            f"returned {len(answer)} scores; legal is a list of {n}, one number or None for each completion, "
            f"in their order"
        )
    return list(answer)
