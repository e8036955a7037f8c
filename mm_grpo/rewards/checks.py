"""What counts as a score, and what is told of an answer that is none.

The trainer's process and the worker processes judge answers by the same functions here, so an isolated
reward scores as it would without. A score is a finite number or None ("does not apply"); what is no
score is described in words, never replaced by a number.
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.rewards.registry import code_of

LEGAL = "legal is a finite number, or None where the reward does not apply"

Checked = float | None | str
"""A score, None, or the words about an answer that is no score."""


@dataclass(frozen=True)
class Fault:
    """An exception out of a reward, in plain text: `what` is its type and message; where it was raised."""

    what: str
    file: str | None = None
    line: int | None = None
    trace: str = ""


class WorkerTrace(Exception):
    """The traceback of an exception in a worker process; the cause of the error raised for it."""

    def __str__(self) -> str:
        return "\n" + "".join(map(str, self.args))


def score_of(value: Any) -> float | None:
    """A score as float or None; ValueError says what is wrong with it."""
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


def fault_of(error: BaseException, fn: Callable[..., Any], *own_files: str) -> Fault:
    """What to tell of an exception out of `fn`: the innermost frame in the function's own file, else the
    innermost one outside `own_files`. An exception that cannot be shown is named by its type."""
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be shown"
    code = code_of(fn)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in own_files]
    own = [f for f in frames if code is not None and f.filename == code.co_filename]
    frame = (own or frames)[-1] if frames else None
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        trace = ""
    what = f"{name}: {message}" if message else name
    return Fault(what, frame.filename if frame else None, frame.lineno if frame else None, trace)


def shown(value: Any, limit: int = 80) -> str:
    """A value's repr on one line, cut at `limit`; of a cut text the full length is told."""
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
