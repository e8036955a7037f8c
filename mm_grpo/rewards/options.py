"""Options of a reward: isolation, time-out, error handling, the rows it is for, gates and outcomes.

`RewardOptions` declares and checks them for `@reward(...)` and for an entry of the config; an entry's override the
decorator's. To add one: a field with its docstring, and its use.

A time-out counts from the start of a reward's first call in a step to the answer of its last one. A call that cannot be
killed cannot be masked: a plain function without `isolated` runs in the trainer's process, and its time-out stops the
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator

from mm_grpo.config.messages import Accepts
from mm_grpo.config.section import Section
from mm_grpo.config.values import Number
from mm_grpo.errors import ConfigError, RewardError
from mm_grpo.numbers import is_number

Action = Literal["stop", "mask"]

HALF = 0.5
"""Default mark of a success: half of the range from 0 to 1 of the built-in rewards for answers."""
ISOLATED_TIMEOUT = 120.0
"""Default time-out of an isolated reward, in seconds for all its calls of a step."""


def _tuple(value: Any) -> Any:
    """Return a YAML list, or a single text or number, as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _names(value: Any) -> Any:
    return () if value is None else _tuple(value)


def _columns(value: Any) -> Any:
    return (
        {column: _tuple(values) for column, values in value.items()} if isinstance(value, Mapping) else value
    )


def _mark(value: Any) -> bool | float:
    if not isinstance(value, bool) and not is_number(value):
        raise ValueError
    return value


Values = Annotated[tuple[str | bool | int | float | None, ...], Field(min_length=1)]


class RewardOptions(Section):
    """Options of a reward: how it is run and how its scores enter the total."""

    model_config = ConfigDict(defer_build=True)  # the import of mm_grpo.rewards need not wait for it

    isolated: bool = False
    """Run in worker processes that can be killed, one call at a time each. Default: in the trainer's process."""
    timeout: Number | None = Field(default=None, gt=0)
    """Seconds for all calls of one step together, > 0. Default: no bound, and 120 for an isolated reward."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """How many calls of an async reward are in flight, or how many workers an isolated one uses, >= 1. Default: all."""
    on_error: Action = "stop"
    """"stop" ends the run; "mask" leaves the completions concerned without a total, counted. A batch function's failure
    concerns all completions of the call. Default: "stop"."""
    on_timeout: Action | None = None
    """The same for a call that is late. Default: `on_error`."""
    when: Annotated[
        dict[str, Values],
        BeforeValidator(_columns),
        Field(min_length=1),
        Accepts("a mapping of columns to a value or a list of values, such as {task: grounding}"),
    ] = Field(default_factory=dict)
    """The rows that the reward is for; every column must hold (one of) its values, of the same type. To other rows it
    does not apply: its score is None, its function is not called, and columns that it needs may be missing there.
    Default: all rows."""
    only_if: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_names),
        Accepts("the name of another reward, or a list of names"),
    ] = ()
    """Names of other rewards; where one of them does not score above 0, this one does not apply. Default: none."""
    outcome: Annotated[
        bool | float,
        PlainValidator(_mark),
        Accepts("true, false, or the least score of a success, such as 0.5"),
    ] = False
    """The reward says whether the answer is right: a completion to which it gives less than its mark, 0.5 with true,
    gains nothing from the others (`outcome.py`). Default: false."""
    completions: Literal["messages", "text"] | None = None
    """What a batch function gets: "messages", as TRL's do, or "text", as ms-swift's do. Default: messages where prompts
    are messages, and text for a class derived from one named ORM."""
    strip_thinking: bool = False
    """Give `completion` or `completions` without the thinking before `</think>` (`without_thinking` in `thinking.py`);
    the empty text where thinking is never closed. `completion_ids` are whole in any case. Default: false."""
    per_turn: bool = False
    """The function answers, for each completion, with a list of one number (or None) for each turn of the model in a
    conversation with tools; what enters the total is their sum. Default: false."""

    def is_for(self, columns: Mapping[str, Any]) -> bool:
        """Return True if `when` selects a row with these columns."""
        return all(
            any(type(value) is type(columns.get(column)) and value == columns.get(column) for value in values)
            for column, values in self.when.items()
        )

    def may_meet(self, other: RewardOptions) -> bool:
        """Return True if some row may be selected by both: no column needs different values."""
        first, second = self._whens, other._whens
        return all(first[column] & second[column] for column in first.keys() & second.keys())

    @property
    def _whens(self) -> dict[str, set[tuple[type, Any]]]:
        return {column: {(type(value), value) for value in values} for column, values in self.when.items()}

    @property
    def mark(self) -> float | None:
        """Least score of a success; None if the reward is no outcome."""
        if isinstance(self.outcome, bool):
            return HALF if self.outcome else None
        return self.outcome

    @property
    def deadline(self) -> float | None:
        """Time-out in seconds, None without one."""
        return ISOLATED_TIMEOUT if self.isolated and self.timeout is None else self.timeout

    def refuse_per_turn(self, name: str) -> None:
        """Raise RewardError if `per_turn` is set, in a run without turns."""
        if self.per_turn:
            raise RewardError(
                f"reward {name!r}: per_turn = true scores the turns of conversations; set rollout.tools or "
                "rollout.environment"
            )

    def check_kind(self, name: str, *, is_async: bool, kind: str) -> None:
        """Raise RewardError for options that this kind of function cannot have."""
        plain = not (is_async or self.isolated)
        if self.max_concurrency is not None and plain:
            wrong = f"max_concurrency = {self.max_concurrency}: is for async and isolated rewards; set isolated: true"
        elif self.on_timeout == "mask" and self.timeout is not None and plain:
            wrong = "on_timeout = 'mask': a plain function cannot be ended; set isolated: true, or on_timeout: stop"
        elif self.completions is not None and kind != "batch":
            wrong = (
                f"completions = {self.completions!r}: is for functions that take `completions`; leave it out"
            )
        else:
            return
        raise RewardError(f"reward {name!r}: {wrong}")


KEYS = tuple(RewardOptions.model_fields)


def read_options(name: str, options: Mapping[str, Any], base: RewardOptions | None = None) -> RewardOptions:
    """Return `base` updated with `options` of the reward `name`. Raise RewardError for a value that is not legal."""
    try:
        return RewardOptions.model_validate(
            {**(base.model_dump(exclude_unset=True) if base else {}), **options}
        )
    except ConfigError as error:
        raise RewardError("\n".join(f"reward {name!r}: {line}" for line in str(error).splitlines())) from None
