"""Environment and tools of one conversation; each call returns a `CallResult`.

The same code runs in the trainer's process and in workers, so both answer alike. A result is plain, whatever a tool
raises or returns: text and upright RGB media within the limits, or one line about the failure.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.environments.observation import Observation, describe_error, failed, observation_of
from mm_grpo.environments.openenv import OpenEnv
from mm_grpo.environments.own_tools import EnvironmentGone
from mm_grpo.rewards.scores import LEGAL, score_of, shown

NOT_TOOLS = ("reset", "get_reward", "close")
Operation = Literal["reset", "call", "get_reward", "close"]
Functions = Mapping[str, Callable[..., Any]]
Factory = Callable[[], Any]
"""Function without arguments that returns a new environment."""


@dataclass(frozen=True)
class CallResult:
    """Outcome of one call; the last four fields tell how it failed."""

    observation: Observation | None = None
    """Answer of a tool, or of `reset` (None if it shows nothing)."""
    reward: float | None = None
    """Result of `get_reward`, or `step_reward` after a tool's call."""
    done: bool = False
    """The conversation is over."""
    raised: str | None = None
    """The exception; with an observation, what is wrong with its reward."""
    late: bool = False
    died: str | None = None
    """How the worker process ended."""
    gone: str | None = None
    """Why the environment is lost although its process lives; the call may be `late` too."""


class Session:
    """Environment of one conversation, made by `factory`, and the tools: its methods and plain `functions`.

    `video_limits` are those of `observation_of`.
    """

    def __init__(
        self, functions: Functions, factory: Factory | None, video_limits: Mapping[str, Any]
    ) -> None:
        self.functions, self.factory, self.video_limits = functions, factory, video_limits
        self.environment: Any = None
        self.tools = dict(functions)

    def answer(self, operation: Operation, name: str, arguments: Mapping[str, Any]) -> CallResult:
        """Make one call; `name` is the tool's for `call`."""
        try:
            if operation == "reset":
                if self.factory is None:
                    return CallResult()
                self.environment = _call(self.factory, {})
                self.tools = {**self.functions, **methods(self.environment)}
                opening = _call(self.environment.reset, arguments)
                return CallResult(None if opening is None else observation_of(opening, **self.video_limits))
            if operation == "call":
                if pays := hasattr(type(self.environment), "step_reward"):  # which its methods set
                    # a call that sets none must not be paid for the last one
                    self.environment.step_reward = None
                observation = self._call_tool(name, arguments)
                over = bool(getattr(self.environment, "done", False))
                try:
                    reward = score_of(self.environment.step_reward) if pays else None
                except Exception as error:  # a property may raise
                    wrong = f"left a bad step_reward: {describe_error(error)}; {LEGAL}"
                    return CallResult(observation, raised=wrong)
                return CallResult(observation, reward, over)
            method = getattr(self.environment, operation, None)
            names = () if method is None else inspect.signature(method).parameters
            values = {name: value for name, value in arguments.items() if name in names}
            answer = None if method is None else _call(method, values)
            if operation == "close":
                return CallResult()
            try:
                return CallResult(reward=score_of(answer))
            except ValueError as error:
                return CallResult(raised=f"answered {shown(answer)}, {error}; {LEGAL}")
        except KeyboardInterrupt:
            raise
        except EnvironmentGone as error:
            return CallResult(late=error.late, gone=str(error))
        except BaseException as error:  # sys.exit(0) and asyncio.CancelledError too
            return CallResult(raised=f"raised {describe_error(error)}")

    def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        tool = self.tools.get(name)
        if tool is None:
            return failed("unknown_tool", f"there is no tool {name!r}; there are {', '.join(self.tools)}")
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return failed("bad_arguments", f"{name}: {error}")
        return observation_of(_call(tool, arguments), **self.video_limits)


def methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment by name: its public methods, or what an OpenEnv server lists."""
    if isinstance(environment, OpenEnv):
        return dict(environment.tools())
    # the class's members: getmembers of the object would evaluate properties
    functions = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = (name for name, _ in functions if not name.startswith("_") and name not in NOT_TOOLS)
    return {name: getattr(environment, name) for name in names}


def _call(function: Any, arguments: Mapping[str, Any]) -> Any:
    result = function(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
