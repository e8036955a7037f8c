"""Callbacks of a run: objects with methods for its events, the user's and the trainer's own.

A method gets by name the arguments that it declares: `on_step_end(self, step, metrics)` gets two. Callbacks run on
the first process; an exception in one ends the run on all processes. Return values are ignored: `trainer.stop(reason)`
ends a run. metrics.jsonl, the page, trackers, the terminal and the guards are callbacks too (open_run.py). To add an
event: a line in EVENTS, and the call in the trainer.
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
"""Event -> arguments, in the order of a run."""
COPIED = ("groups", "evaluations")
"""Arguments that users' methods get as copies, because the run uses them afterwards. Keys added to `metrics` are
logged."""
Method = tuple[Callable[..., Any], tuple[str, ...]]
"""A method, and the arguments that it declares."""


class Callbacks:
    """Callbacks of a run. With `quiet` (processes other than the first) `call` does nothing.

    Raises ConfigError for an object without a method of EVENTS or with any other method `on_...`, and for a method
    that declares an argument that its event does not have.
    """

    def __init__(self, callbacks: Sequence[Any], *, quiet: bool = False) -> None:
        if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
            raise ConfigError(f"callbacks = {callbacks!r}: must be a list of objects")
        self._methods: dict[str, list[Method]] = {}
        for callback in callbacks:
            methods = {event: getattr(callback, event) for event in EVENTS if hasattr(callback, event)}
            if isinstance(callback, type):
                raise ConfigError(
                    f"callbacks: {callback.__name__} is a class; pass an object, as {callback.__name__}()"
                )
            if not methods:
                raise ConfigError(
                    f"callbacks: {callback!r} has none of the methods {', '.join(EVENTS)}, and would never be called"
                )
            for name in dir(callback):
                if name.startswith("on_") and name not in EVENTS:
                    raise ConfigError(
                        f"callbacks: {type(callback).__name__}.{name} would never be called; "
                        f"{did_you_mean(name, EVENTS)}the methods are {', '.join(EVENTS)}"
                    )
            for event, method in methods.items():
                names = _argument_names(method, event, f"{type(callback).__name__}.{event}")
                self._methods.setdefault(event, []).append((_with_copies(method), names))
        self.current_event, self._quiet = "", quiet

    def surround(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Add callbacks of the trainer, to be called `before` the user's and `after` them."""

        def methods(callbacks: Sequence[Any], event: str) -> list[Method]:
            bound = [getattr(callback, event) for callback in callbacks if hasattr(callback, event)]
            return [(method, _argument_names(method, event, event)) for method in bound]

        for event in EVENTS:
            inner = self._methods.get(event, [])
            self._methods[event] = methods(before, event) + inner + methods(after, event)

    def call(self, event: str, **values: Any) -> None:
        """Call `event` on each callback, passing only the arguments that its method declares."""
        for method, names in () if self._quiet else self._methods.get(event, ()):
            self.current_event = event
            try:
                method(**{name: values[name] for name in names})
            finally:
                self.current_event = ""

    def refuse_collective(self, name: str, processes: int) -> None:
        """Raise ConfigError if a callback of several processes calls `trainer.<name>`, which is collective."""
        if self.current_event and processes > 1:
            raise ConfigError(
                f"callbacks: {self.current_event} calls trainer.{name}, which all {processes} processes have to call "
                "together, and callbacks run on the first one; set run.eval_every or run.save_every"
            )


def _with_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **values: method(**{n: own_copy(v) if n in COPIED else v for n, v in values.items()})


def _argument_names(method: Callable[..., Any], event: str, label: str) -> tuple[str, ...]:
    """Return the event's arguments that a method declares. Raises ConfigError if it requires another one."""
    legal, names = EVENTS[event], []
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return legal
        if name in legal and parameter.kind is not parameter.POSITIONAL_ONLY:
            names.append(name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ConfigError(f"callbacks: {label} asks for {name!r}; legal are {', '.join(legal)}, by name")
    return tuple(names)
