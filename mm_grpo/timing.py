"""Seconds by name, and spans of the thread that trains while a profile is recorded.

`timed` adds up a step's seconds and `span` marks a block. Without a `Recorder` a span costs about a microsecond.
run/profile.py shows what was recorded.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

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
    """A block or a function under a name, which a recorder of this thread notes where there is one.

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
        recorder = _recorder
        own = recorder is not None and recorder.thread == threading.get_ident()
        self._recorder = recorder if own else None
        if self._recorder is not None:
            if self.device:
                _synchronize()
            self._start = self._recorder.enter(self.name)

    def __exit__(self, *exception: object) -> None:
        if self._recorder is not None:
            if self.device:
                _synchronize()
            self._recorder.leave(self.name, self._start)


class Recorder:
    """The seconds of every path of spans of the thread that calls `start`, up to `stop`.

    `seconds` has (seconds, times) by path, such as ("time/learner", "forward"); that of the whole is (). A step is no
    part of a path: its phases stand beside what is between steps. `watch` are entered with spans by name, beside their
    time. One recorder records at a time.
    """

    def __init__(self, watch: Mapping[str, AbstractContextManager[object]] | None = None) -> None:
        self.watch = watch or {}
        self.seconds: dict[tuple[str, ...], list[float]] = {}
        self.done = 0
        """Steps that have ended."""
        self.begin = 0.0
        self.thread = 0
        self._path: tuple[str, ...] = ()

    def start(self) -> None:
        """Record from now on. An earlier recorder, of a run that did not end, is stopped."""
        global _recorder
        if _recorder is not None:
            _recorder.stop()
        self.thread, self.begin, _recorder = threading.get_ident(), time.perf_counter(), self

    def stop(self) -> None:
        """Record no more; without effect where this one does not record."""
        global _recorder
        if _recorder is self:
            _recorder = None
            self._add((), time.perf_counter() - self.begin)

    def enter(self, name: str) -> float:
        """A span begins; returns its start."""
        if name in self.watch:
            with span(WATCHING):
                self.watch[name].__enter__()
        self._path = (*self._path, name)
        return time.perf_counter()

    def leave(self, name: str, start: float) -> None:
        """The span ends."""
        path = (STEP,) if name == STEP else tuple(part for part in self._path if part != STEP)
        self._add(path, time.perf_counter() - start)
        self._path = self._path[:-1]
        self.done += name == STEP
        if name in self.watch:
            with span(WATCHING):
                self.watch[name].__exit__(None, None, None)

    def _add(self, path: tuple[str, ...], seconds: float) -> None:
        found = self.seconds.setdefault(path, [0.0, 0])
        found[0] += seconds
        found[1] += 1


_recorder: Recorder | None = None


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
