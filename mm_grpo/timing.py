"""Seconds by name, and spans of what this process does while a profile is recorded.

`timed` adds up a step's seconds, `span` marks a block and `record` what others did meanwhile, such as a worker process.
Without a `Recorder` a span costs about a microsecond. What is made of the spans is in run/profile.py.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STEP = "step_time"
"""The span of a step, which holds those of its phases."""
WATCHING = "profiling"
"""That of what a profile itself costs."""


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to `times[name]`; a block that raises is not counted."""
    with span(name):
        start = time.perf_counter()
        yield
        times[name] = times.get(name, 0.0) + time.perf_counter() - start


class span:  # `with span("forward"):`, or `@span("forward")`
    """A block or a function under a name, which a recorder notes where there is one.

    On a GPU one with `device` waits for the work that it began, and for what was begun before, so that its time is its
    own; only while a profile is recorded.
    """

    __slots__ = ("_recorder", "_start", "device", "name")

    def __init__(self, name: str, *, device: bool = False) -> None:
        self.name, self.device = name, device

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function as such a block, whenever it is called."""

        @functools.wraps(function)
        def spanned(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(self.name, device=self.device):
                return function(*args, **kwargs)

        return spanned

    def __enter__(self) -> None:
        self._recorder = recorder = _recorder
        if recorder is not None:
            if self.device:
                _synchronize()
            self._start = recorder.enter(self.name)

    def __exit__(self, *exception: object) -> None:
        if self._recorder is not None:
            if self.device:
                _synchronize()
            self._recorder.leave(self.name, self._start)


def record(name: str, lane: str, seconds: float, **values: Any) -> None:
    """Note what ends now and took `seconds`, beside this thread: `lane` is who did it, of whom there may be several."""
    recorder = _recorder
    if recorder is not None:
        recorder.note(Event(name, lane, time.perf_counter() - seconds, seconds, values))


@dataclass(frozen=True)
class Event:
    """A span that has ended: `start` by time.perf_counter. `lane` is a thread's name, or who else was at work."""

    name: str
    lane: str
    start: float
    seconds: float
    values: dict[str, Any]
    thread: bool = False


class Recorder:
    """Spans from `start` to `stop`: the seconds of every path of spans of this thread, and events of the first `steps`.

    `seconds` has (seconds, times) by path, such as ("time/learner", "forward"); that of the whole is (). A step is no
    part of a path: its phases stand beside what is between steps. `traced` is called once, when the events are those of
    all `steps`, or at the end. `watch` are entered with this thread's spans by name, beside their time. One
    recorder records at a time.
    """

    def __init__(
        self,
        steps: int,
        traced: Callable[[Recorder], None] | None = None,
        watch: Mapping[str, AbstractContextManager[object]] | None = None,
    ) -> None:
        self.steps, self.traced, self.watch = steps, traced, watch or {}
        self.seconds: dict[tuple[str, ...], list[float]] = {}
        self.events: list[Event] = []
        self.done = 0
        self.begin = 0.0
        self._path: tuple[str, ...] = ()
        self._main = threading.get_ident()
        self._tracing = True

    def start(self) -> None:
        """Record from now on. An earlier recorder, of a run that did not end, is stopped."""
        global _recorder
        if _recorder is not None:
            _recorder.stop()
        self._main, self.begin, _recorder = threading.get_ident(), time.perf_counter(), self

    def stop(self) -> None:
        """Record no more; without effect where this one does not record."""
        global _recorder
        if _recorder is self:
            _recorder = None
            self._add((), time.perf_counter() - self.begin)
            self._end_trace()

    def enter(self, name: str) -> float:
        """A span begins; returns its start."""
        if threading.get_ident() == self._main:
            if name == STEP and self.done >= self.steps:
                self._end_trace()
            if name in self.watch:
                with span(WATCHING):
                    self.watch[name].__enter__()
            self._path = (*self._path, name)
        return time.perf_counter()

    def leave(self, name: str, start: float) -> None:
        """The span ends."""
        seconds, thread = time.perf_counter() - start, threading.current_thread()
        if thread.ident == self._main:
            path = (STEP,) if name == STEP else tuple(part for part in self._path if part != STEP)
            self._add(path, seconds)
            self._path = self._path[:-1]
            self.done += name == STEP
            if name in self.watch:
                with span(WATCHING):
                    self.watch[name].__exit__(None, None, None)
        self.note(Event(name, thread.name, start, seconds, {}, thread=True))

    def note(self, event: Event) -> None:
        """Keep an event, unless there are those of enough steps."""
        if self._tracing:
            self.events.append(event)

    def _add(self, path: tuple[str, ...], seconds: float) -> None:
        found = self.seconds.setdefault(path, [0.0, 0])
        found[0] += seconds
        found[1] += 1

    def _end_trace(self) -> None:
        if self._tracing:
            self._tracing = False
            if self.traced is not None:
                self.traced(self)


_recorder: Recorder | None = None


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
