"""Checks of what a reward function returns: a `Score`, the scores of turns, or a `Fault`. Nothing is replaced."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.errors import shorten
from mm_grpo.numbers import MAX_MAGNITUDE

LEGAL = "legal is a finite number, or None where the reward does not apply"
LEGAL_TURNS = "legal is a list with a finite number or None for each turn of the model, for per_turn is true"

Score = float | None
"""A finite number, or None when the reward does not apply."""


@dataclass(frozen=True)
class Fault:
    """Returned value that is no score; `reason` says why, in a message."""

    reason: str


Checked = Score | list[Score] | Fault
"""A checked value for one completion; a list has the scores of its turns (`per_turn`)."""


def score_of(value: Any) -> Score:
    """Return a score as float or None. The message of the ValueError says what is wrong with it."""
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
    if not size <= MAX_MAGNITUDE:  # NaN too
        raise ValueError(f"which is not finite, or beyond {MAX_MAGNITUDE:.3g}")
    return float(value)


def check_answer(answer: Any, kind: Literal["completion", "batch"], n: int, per_turn: bool) -> list[Checked]:
    """Check a function's answer for n completions. Raise ValueError if a batch's is no list of n.

    With `per_turn` each is a list of scores, or None. The number of turns is checked by `RewardCalls.set_scores`.
    """
    values = [answer] if kind == "completion" else _as_list(answer, n, axes=2 if per_turn else 1)
    checked: list[Checked] = []
    for value in values:
        try:
            checked.append(_turn_scores(value) if per_turn else score_of(value))
        except ValueError as error:
            legal = LEGAL_TURNS if per_turn else LEGAL
            checked.append(Fault(f"returned {shown(value)}, {error}; {legal}"))
    return checked


def _turn_scores(value: Any) -> list[Score] | None:
    """Return the scores of a completion's turns, None if the reward does not apply to it."""
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"a {type(value).__name__}")
    return [score_of(score) for score in value]


def total_of(scores: Sequence[Score]) -> Score:
    """Sum the scores that apply. Return None if none does: a 0 would be an invented score."""
    applied = [score for score in scores if score is not None]
    return math.fsum(applied) if applied else None


def shown(value: Any, limit: int = 80) -> str:
    """Return a value's repr on one line, cut at `limit`. A text that was cut gets its full length appended."""
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value)} characters)"
    return shorten(repr(value), limit)


def _as_list(answer: Any, n: int, axes: int) -> list[Any]:
    # a numpy array, a torch tensor
    if getattr(answer, "ndim", None) in range(1, axes + 1) and hasattr(answer, "tolist"):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise ValueError(f"returned {shown(answer)}; legal is a list of {n} numbers or None")
    if len(answer) != n:
        raise ValueError(f"returned {len(answer)} scores; legal is a list of {n} numbers or None, in order")
    return list(answer)
