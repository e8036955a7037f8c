"""What is a score: a finite number, or None where a reward does not apply; all else is described, never replaced."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

from mm_grpo.errors import shorten
from mm_grpo.numbers import MAX_MAGNITUDE

LEGAL = "legal is a finite number, or None where the reward does not apply"
LEGAL_TURNS = "legal is a list with a finite number or None for each turn of the model, for per_turn is true"
Checked = float | None | str | list[float | None]
"""A score, None, or why an answer is no score; of a reward with `per_turn` a list of scores and None."""


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
    size: Any = abs(value)
    if not size <= MAX_MAGNITUDE:
        raise ValueError(f"which is not finite, or beyond {MAX_MAGNITUDE:.3g}")
    return float(value)


def scores_of(answer: Any, kind: Literal["completion", "batch"], n: int, per_turn: bool) -> list[Checked]:
    """A function's answer as n checked scores; ValueError when a batch's is no list of n.

    With `per_turn` each is a list of scores, or None. How many turns a completion has is not known here.
    """
    values = [answer] if kind == "completion" else _list(answer, n, axes=2 if per_turn else 1)
    checked: list[Checked] = []
    for value in values:
        try:
            checked.append(_turns(value) if per_turn else score_of(value))
        except ValueError as error:
            legal = LEGAL_TURNS if per_turn else LEGAL
            checked.append(f"returned {shown(value)}, {error}; {legal}")
    return checked


def _turns(value: Any) -> list[float | None] | None:
    """The scores of a completion's turns, None where the reward does not apply to it."""
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"a {type(value).__name__}")
    return [score_of(each) for each in value]


def total_of(scores: Sequence[float | None]) -> float | None:
    """The sum of the scores that apply, None where none does: a 0 would be an invented one."""
    applied = [score for score in scores if score is not None]
    return math.fsum(applied) if applied else None


def shown(value: Any, limit: int = 80) -> str:
    """A value's repr on one line, cut at `limit`; a text that was cut has its full length behind it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value)} characters)"
    return shorten(repr(value), limit)


def _list(answer: Any, n: int, axes: int) -> list[Any]:
    # a numpy array, a torch tensor
    if getattr(answer, "ndim", None) in range(1, axes + 1) and hasattr(answer, "tolist"):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise ValueError(f"returned {shown(answer)}; legal is a list of {n} numbers or None")
    if len(answer) != n:
        raise ValueError(f"returned {len(answer)} scores; legal is a list of {n} numbers or None, in order")
    return list(answer)
