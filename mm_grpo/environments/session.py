"""The user's side of one conversation: its environment and its tools, and each call of them as an `CallResult`.

The same code runs in the trainer's process and in workers, so both answer alike. Whatever a tool raises or returns, an
answer is plain: text and upright RGB images within the limits, or what went wrong in one line.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.environments.observation import Limits, Observation, described, failed, observation_of
from mm_grpo.environments.own_tools import EnvironmentGone, OwnTools
from mm_grpo.rewards.scores import LEGAL, score_of, shown

NOT_TOOLS = ("reset", "get_reward", "close")
What = Literal["reset", "call", "get_reward", "close"]
Factory = Callable[[], Any]
"""Makes an environment."""


@dataclass(frozen=True)
class CallResult:
    """Outcome of one call. `observation` is what `reset` (None: nothing) or a tool answered, `reward` that of
    `get_reward`, or the `step_reward` after a call, `done` whether the conversation is over. Else the call `raised`
    (with an observation: about its reward), was `late`, or its process `died`. `gone` says why the environment alone
    is lost with the call, which is then `late` or not."""

    observation: Observation | None = None
    reward: float | None = None
    done: bool = False
    raised: str | None = None
    late: bool = False
    died: str | None = None
    gone: str | None = None


class Session:
    """The environment of one conversation, made by `factory`, and the tools: its own and plain `functions`."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], factory: Factory | None, limits: Limits
    ) -> None:
        self.functions, self.factory, self.limits = functions, factory, limits
        self.environment: Any = None
        self.tools = dict(functions)

    def answer(self, what: What, name: str, arguments: Mapping[str, Any]) -> CallResult:
        """Make one call; `name` is the tool's for `call`."""
        try:
            if what == "reset":
                if self.factory is None:
                    return CallResult()
                self.environment = _called(self.factory, {})
                self.tools = {**self.functions, **methods(self.environment)}
                opening = _called(self.environment.reset, arguments)
                return CallResult(None if opening is None else observation_of(opening, self.limits))
            if what == "call":
                if pays := pays_steps(self.environment):
                    self.environment.step_reward = None  # what a call does not set is not paid twice
                seen = self._call(name, arguments)
                done = bool(getattr(self.environment, "done", False))
                try:
                    return CallResult(seen, score_of(self.environment.step_reward) if pays else None, done)
                except Exception as error:  # a property may raise
                    return CallResult(seen, raised=f"left a bad step_reward: {described(error)}; {LEGAL}")
            method = getattr(self.environment, what, None)
            found = None if method is None else _called(method, _asked_for(method, arguments))
            if what == "close":
                return CallResult()
            try:
                return CallResult(reward=score_of(found))
            except ValueError as error:
                return CallResult(raised=f"answered {shown(found)}, {error}; {LEGAL}")
        except KeyboardInterrupt:
            raise
        except EnvironmentGone as error:
            return CallResult(late=error.late, gone=str(error))
        except BaseException as error:  # sys.exit(0) and asyncio.CancelledError too
            return CallResult(raised=f"raised {described(error)}")

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        tool = self.tools.get(name)
        if tool is None:
            return failed("unknown_tool", f"there is no tool {name!r}; there are {', '.join(self.tools)}")
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return failed("bad_arguments", f"{name}: {error}")
        return observation_of(_called(tool, arguments), self.limits)


def pays_steps(environment: Any) -> bool:
    """True when the class of an environment says that its methods leave a reward in `step_reward`."""
    return hasattr(type(environment), "step_reward")


def methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The tools of an environment by name: its public methods, unless it names them itself.

    Methods are looked for on the class: asking the object would evaluate properties.
    """
    if isinstance(environment, OwnTools):
        return dict(environment.tools())
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = (name for name, _ in found if not name.startswith("_") and name not in NOT_TOOLS)
    return {name: getattr(environment, name) for name in names}


def _asked_for(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in inspect.signature(method).parameters}


def _called(function: Any, arguments: Mapping[str, Any]) -> Any:
    result = function(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
