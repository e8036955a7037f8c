"""The user's side of one conversation: its environment and its tools, and each call of them as an `Answer`.

The same code runs in the trainer's process and in workers, so both answer alike. Whatever a tool raises or returns, an
answer is plain: text and upright RGB images within the limits, or what went wrong in one line.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.environments.observation import Limits, Observation, described, failed, observation_of, text_of
from mm_grpo.rewards.user_code import end_fork

NOT_TOOLS = ("reset", "get_reward", "close")
What = Literal["reset", "call", "get_reward", "close"]


@dataclass(frozen=True)
class Answer:
    """What came of one call. `observation` is what `reset` or a tool answered, None where a reset showed nothing,
    `reward` what `get_reward` said, `done` whether the conversation is over by its environment. Else there is no
    answer: the call `raised` something, was `late`, or its process `died`.
    """

    observation: Observation | None = None
    reward: float | None = None
    done: bool = False
    raised: str | None = None
    late: bool = False
    died: str | None = None


class Session:
    """The environment of one conversation, made by `factory`, and the tools: its methods and plain `functions`."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], factory: Callable[[], Any] | None, limits: Limits
    ) -> None:
        self.functions, self.factory, self.limits = functions, factory, limits
        self.environment: Any = None
        self.tools = dict(functions)

    def answer(self, what: What, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Make one call: `reset` with the row, `call` of a tool by its name, `get_reward`, or `close`."""
        try:
            if what == "reset":
                self.environment = _called(self.factory, {}) if self.factory is not None else None
                if self.environment is None:
                    return Answer()
                self.tools = {**self.functions, **methods(self.environment)}
                shown = _called(self.environment.reset, arguments)
                return Answer(None if shown is None else observation_of(shown, self.limits))
            if what == "call":
                seen = self._call(name, arguments)
                return Answer(seen, done=bool(getattr(self.environment, "done", False)))
            method = getattr(self.environment, what, None)
            found = None if method is None else _called(method, {})
            if what == "close" or found is None:
                return Answer()
            if not isinstance(found, int | float):
                return Answer(raised=f"answered {text_of(lambda: repr(found))}; it must be a number")
            return Answer(reward=float(found))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit(0) and asyncio.CancelledError too
            return Answer(raised=f"raised {described(error)}")

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        tool = self.tools.get(name)
        if tool is None:
            return failed("unknown_tool", f"there is no tool {name!r}; there are {', '.join(self.tools)}")
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return failed("bad_arguments", f"{name}: {error}")
        return observation_of(_called(tool, arguments), self.limits)


def methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods that are tools, by name. On the class: asking the object would evaluate properties."""
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = (name for name, _ in found if not name.startswith("_") and name not in NOT_TOOLS)
    return {name: getattr(environment, name) for name in names}


def _called(function: Any, arguments: Mapping[str, Any]) -> Any:
    process = os.getpid()
    try:
        result = function(**arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result
    finally:
        end_fork(process, "a tool or an environment")
