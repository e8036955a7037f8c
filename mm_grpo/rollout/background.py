"""Calls in background threads that never keep the process from ending.

As `concurrent.futures.ThreadPoolExecutor`, whose threads Python waits for at its end however long a request takes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """`threads` daemon threads that make the calls given to `submit`, in order. They start with the first call.

    Each calls `prepare` first.
    """

    def __init__(self, threads: int, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self.threads, self.name, self.prepare = threads, name, prepare
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._started: list[Thread] = []
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Make a call as soon as a thread is free. RuntimeError after `close`."""
        self.require_open()
        future: Future[T] = Future()
        self._calls.put((future, call))
        if len(self._started) < self.threads:
            name = f"{self.name} {len(self._started) + 1}"
            thread = Thread(target=self._work, name=name, daemon=True)
            self._started.append(thread)
            thread.start()
        return future

    def require_open(self) -> None:
        """RuntimeError after `close`; for long calls, which look at it now and then."""
        if self._closed:
            raise RuntimeError(f"{self.name}: the run has ended")

    def close(self) -> None:
        """Make no further call, and cancel those that wait. A thread ends when its call has."""
        self._closed = True
        while not self._calls.empty():
            waiting = self._calls.get()
            if waiting is not None:
                waiting[0].cancel()
        for _ in self._started:
            self._calls.put(None)

    def _work(self) -> None:
        self.prepare()
        while (taken := self._calls.get()) is not None:
            future, call = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del taken, future, call
