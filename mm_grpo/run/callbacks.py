"""Callbacks of a run: objects with methods that are called at its events, the user's and the trainer's own.

Each method is given, by name, those of the event's arguments that it asks for: `on_step_end(self, step, metrics)`
asks for two. They are called on the first process, and an exception in one ends the run on all of them. What a method
returns is not looked at: `trainer.stop(reason)` is how one ends the run. metrics.jsonl, the page, trackers, the
terminal and the guards are callbacks too (open_run.py). To add an event: a line in EVENTS, and the call in the trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mm_grpo.errors import ConfigError, did_you_mean
from mm_grpo.user_code.kept_state import own_copy

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": ("trainer", "step"),
    "on_rollouts": ("trainer", "step", "groups"),
    "on_step_end": ("trainer", "step", "metrics"),
    "on_evaluate": ("trainer", "step", "metrics", "evaluations"),
    "on_log": ("trainer", "step", "metrics"),
    "on_save": ("trainer", "step", "path"),
    "on_train_end": ("trainer", "step", "summary"),
}
"""The arguments of each event, in the order in which a run comes to them first."""
COPIED = ("groups", "evaluations")
"""Arguments of which the user's methods get copies: the run goes on with them. What is added to `metrics` is logged."""


class Callbacks:
    """Objects with any of the methods EVENTS. `quiet` calls nothing, for processes other than the first.

    ConfigError for an object that has none of them, that has another method `on_...`, which nothing would call, or
    whose method asks for what its event is not given.
    """

    def __init__(self, callbacks: Sequence[Any], *, quiet: bool = False) -> None:
        if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
            raise ConfigError(f"callbacks = {callbacks!r}: must be a list of objects")
        self._methods: dict[str, list[tuple[Callable[..., Any], tuple[str, ...]]]] = {}
        for callback in callbacks:
            found = {event: getattr(callback, event) for event in EVENTS if hasattr(callback, event)}
            if isinstance(callback, type):
                raise ConfigError(
                    f"callbacks: {callback.__name__} is a class; pass an object, as {callback.__name__}()"
                )
            if not found:
                raise ConfigError(
                    f"callbacks: {callback!r} has none of the methods {', '.join(EVENTS)}, and would never be called"
                )
            for name in dir(callback):
                if name.startswith("on_") and name not in EVENTS:
                    raise ConfigError(
                        f"callbacks: {type(callback).__name__}.{name} would never be called; "
                        f"{did_you_mean(name, EVENTS)}the methods are {', '.join(EVENTS)}"
                    )
            for event, method in found.items():
                asked = _asked_for(method, event, f"{type(callback).__name__}.{event}")
                self._methods.setdefault(event, []).append((_with_copies(method), asked))
        self.calling, self._quiet = "", quiet

    def surround(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Call the trainer's own callbacks `before` the user's and `after` them."""

        def methods(own: Sequence[Any], event: str) -> list[tuple[Callable[..., Any], tuple[str, ...]]]:
            found = [getattr(one, event) for one in own if hasattr(one, event)]
            return [(method, _asked_for(method, event, event)) for method in found]

        for event in EVENTS:
            self._methods[event] = (
                methods(before, event) + self._methods.get(event, []) + methods(after, event)
            )

    def call(self, event: str, **values: Any) -> None:
        """Call the method `event` of each one that has it, with what it asks for of `values`."""
        for method, asked in () if self._quiet else self._methods.get(event, ()):
            self.calling = event
            try:
                method(**{name: values[name] for name in asked})
            finally:
                self.calling = ""

    def refuse_collective(self, what: str, processes: int) -> None:
        """ConfigError for a call of `what`, which all processes make together, from a callback of one of several."""
        if self.calling and processes > 1:
            raise ConfigError(
                f"callbacks: {self.calling} calls trainer.{what}, which all {processes} processes have to call "
                "together, and callbacks run on the first one; set run.eval_every or run.save_every"
            )


def _with_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **given: method(**{n: own_copy(v) if n in COPIED else v for n, v in given.items()})


def _asked_for(method: Callable[..., Any], event: str, what: str) -> tuple[str, ...]:
    """The names of an event's arguments that a method takes; ConfigError where it needs another."""
    given, asked = EVENTS[event], []
    if not callable(method):
        raise ConfigError(f"callbacks: {what} is {method!r}; it must be a method")
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return given
        if name in given and parameter.kind is not parameter.POSITIONAL_ONLY:
            asked.append(name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"callbacks: {what} asks for {name!r}; it may ask for {', '.join(given)}, by name"
            )
    return tuple(asked)
