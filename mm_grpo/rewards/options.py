"""The options of a reward: isolation, time-out, retries, error handling, the rows it is for, gates and clipping.

`RewardOptions` holds them; `read_options` checks what `@reward(...)` or an entry of the config gives. The
keys mean the same in both, and an entry's win over the decorator's. To add one: a field in `RewardOptions`
with its unit and bounds, the same in `OptionSettings` (the parameters of `@reward`), and its check in
`_CHECKS`.

A time-out counts from the start of a reward's first call in a step to the answer of its last one. What
cannot be killed cannot be masked: a plain function without `isolated` runs in the trainer's process, and
its time-out stops the run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from mm_grpo.errors import RewardError
from mm_grpo.types import LONGEST, is_number

Action = Literal["stop", "mask"]
Clip = tuple[float | None, float | None]
When = tuple[tuple[str, tuple[Any, ...]], ...]
"""Columns, each with its values."""

ISOLATED_TIMEOUT = 120.0
"""The time-out of an isolated reward that sets none, in seconds for all its calls of a step."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class RewardOptions:
    """How one reward is run and how its scores enter the total.

    - `isolated`: in worker processes that can be killed, one call at a time each. Default: in the trainer's.
    - `timeout`: seconds, above 0, for all calls of one step together. Default: no bound, and 120 for an
      isolated reward, which always has one.
    - `retries`: how often a call that raised (or whose process died) is made again within the time-out,
      0 or more; an async one waits 0.5, 1, 2, ... seconds in between. Default: 0.
    - `max_concurrency`: how many calls of an async reward are in flight, or how many workers an isolated
      one uses, 1 or more. Default: all calls, all workers.
    - `memory_limit`: bytes, or a text such as "2GB", that a call of an isolated reward may allocate beyond
      what its worker holds. Default: none.
    - `on_error`, `on_timeout`: "stop" ends the run; "mask" leaves the completions concerned without a
      total, counted. A batch function's failure concerns all completions of the call. Default: the
      scorer's `on_error`, which is "stop"; `on_timeout` follows `on_error`.
    - `when`: the rows that the reward is for, as {column: value or list of values}; every column must hold (one of)
      its values, of the same type. To other rows it does not apply: its score is None, its function is not called, and
      columns that it needs may be missing there. Default: all rows.
    - `only_if`: names of other rewards; where one of them does not score above 0, this one does not apply
      (its score is None, and its function is not called).
    - `clip`: (lowest, highest) of what enters the total, None for no bound; raw parts stay as they are.
    - `completions`: what a batch function gets: "messages", as TRL's do, or "text", as ms-swift's do.
      Default: messages where prompts are messages, and text for a class derived from one named ORM.
    - `strip_thinking`: whether `completion` or `completions` are given without the thinking before `</think>`
      (`without_thinking` in `thinking.py`); the empty text where thinking is never closed. `completion_ids` are whole
      in any case. Default: false.
    - `per_turn`: whether the function answers, for each completion, with a list of one number (or None) for each turn
      of the model in a conversation with tools; what enters the total is their sum. Default: false.
    """

    isolated: bool = False
    timeout: float | None = None
    retries: int = 0
    max_concurrency: int | None = None
    memory_limit: int | None = None
    on_error: Action | None = None
    on_timeout: Action | None = None
    when: When = ()
    only_if: tuple[str, ...] = ()
    clip: Clip | None = None
    completions: Literal["messages", "text"] | None = None
    strip_thinking: bool = False
    per_turn: bool = False

    def is_for(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row with these columns is one of those that `when` names."""
        return all(
            any(type(value) is type(columns.get(column)) and value == columns.get(column) for value in values)
            for column, values in self.when
        )

    @property
    def deadline(self) -> float | None:
        """The time-out in seconds that counts."""
        return ISOLATED_TIMEOUT if self.isolated and self.timeout is None else self.timeout

    def clipped(self, score: float) -> float:
        """The score as it enters the total."""
        low, high = self.clip or (None, None)
        score = score if low is None else max(low, score)
        return score if high is None else min(high, score)


class OptionSettings(TypedDict, total=False):
    """The options as `@reward` takes them; `RewardOptions` describes each."""

    isolated: bool
    timeout: float | None
    retries: int
    max_concurrency: int | None
    memory_limit: int | str | None
    on_error: Action
    on_timeout: Action
    when: Mapping[str, Any]
    only_if: str | Sequence[str]
    clip: Sequence[float | None]
    completions: Literal["messages", "text"]
    strip_thinking: bool
    per_turn: bool


def read_options(name: str, given: Mapping[str, Any], base: RewardOptions | None = None) -> RewardOptions:
    """`base` with the given options of the reward `name`; RewardError names a value that is not legal."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        legal, check = _CHECKS[key]
        try:
            values[key] = check(value)
        except (TypeError, ValueError):
            raise RewardError(f"reward {name!r}: {key} is {value!r}; legal is {legal}") from None
    return dataclasses.replace(base or RewardOptions(), **values)


def check_options(name: str, options: RewardOptions, *, is_async: bool, kind: str) -> None:
    """RewardError for options that this kind of function cannot have."""
    if options.max_concurrency is not None and not (is_async or options.isolated):
        raise RewardError(
            f"reward {name!r}: max_concurrency = {options.max_concurrency} is for async and for isolated "
            f"rewards; this one is a plain function that is called once after the other. Leave it out, or "
            f"set isolated: true"
        )
    if options.memory_limit is not None and not options.isolated:
        raise RewardError(
            f"reward {name!r}: memory_limit = {options.memory_limit} needs isolated: true; in the trainer's "
            f"process it would hold the trainer to it"
        )
    if options.on_timeout == "mask" and options.timeout is not None and not (is_async or options.isolated):
        raise RewardError(
            f"reward {name!r}: timeout = {options.timeout:g} and on_timeout is 'mask', but a plain function in "
            f"the trainer's process cannot be ended; set isolated: true, or on_timeout: stop"
        )
    if options.completions is not None and kind != "batch":
        raise RewardError(
            f"reward {name!r}: completions = {options.completions!r} is for functions that take "
            f"`completions`; `completion` is always the text"
        )
    if options.per_turn and options.clip is not None:
        raise RewardError(
            f"reward {name!r}: clip = {list(options.clip)} bounds one number for a completion, and per_turn is true; "
            "bound the numbers in the function"
        )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if not (is_number(value) and 0 < value <= LONGEST):
        raise ValueError
    return float(value)


def _count(least: int, *, optional: bool) -> Callable[[Any], int | None]:
    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError
        return value

    return check


def _bytes(value: Any) -> int | None:
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError
        value = round(float(found[1]) * _UNITS[found[2].upper()])
    return _count(1, optional=True)(value)


def _one_of(*legal: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if value is not None and value not in legal:
            raise ValueError
        return None if value is None else str(value)

    return check


def _names(value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(name, str) and name for name in given):
        raise ValueError
    return given


def _when(value: Any) -> When:
    if not isinstance(value, Mapping) or not value:
        raise TypeError
    found = {
        column: tuple(values) if isinstance(values, list | tuple) else (values,)
        for column, values in value.items()
    }
    for column, values in found.items():
        if not isinstance(column, str) or not values:
            raise ValueError
        if not all(each is None or isinstance(each, str | bool | int | float) for each in values):
            raise ValueError
    return tuple(found.items())


def _bounds(value: Any) -> Clip | None:
    if value is None:
        return None
    if isinstance(value, str) or len(value) != 2:
        raise ValueError
    low, high = (None if bound is None else _finite(bound) for bound in value)
    if low is high is None or (low is not None and high is not None and low > high):
        raise ValueError
    return low, high


def _finite(value: Any) -> float:
    if not is_number(value):
        raise ValueError
    return float(value)


# Key: what is legal, for the message, and the check that gives the value as `RewardOptions` holds it.
_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "isolated": ("true or false", _flag),
    "timeout": ("a number of seconds above 0, or null for none", _seconds),
    "retries": ("a whole number, 0 or more", _count(0, optional=False)),
    "max_concurrency": ("a whole number, 1 or more, or null for no limit", _count(1, optional=True)),
    "memory_limit": ("a number of bytes, or a text such as 512MB or 2GiB, or null for none", _bytes),
    "on_error": ("stop or mask", _one_of("stop", "mask")),
    "on_timeout": ("stop or mask", _one_of("stop", "mask")),
    "when": ("a mapping of columns to a value or a list of values, such as {task: grounding}", _when),
    "only_if": ("the name of another reward, or a list of names", _names),
    "clip": ("[lowest, highest], two finite numbers in order, of which one may be null", _bounds),
    "completions": ("messages or text", _one_of("messages", "text")),
    "strip_thinking": ("true or false", _flag),
    "per_turn": ("true or false", _flag),
}
KEYS = tuple(_CHECKS)
