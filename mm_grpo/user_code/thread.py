"""Calls in the trainer's process with a deadline: in a thread, which can be waited for but not ended.

Where the thread lets nothing else run, a watchdog ends the process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from mm_grpo.user_code.watchdog import watchdog

T = TypeVar("T")
WITHOUT_LOCK = 5.0
"""Seconds after a deadline in which this process must have noticed it, or be ended."""


class CallThread(Generic[T]):
    """A daemon thread, for which Python does not wait at its end, that makes one call after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def result(self, call: Callable[[], T], seconds: float) -> T:
        """The answer of a call. TimeoutError where it takes longer; the thread is lost then."""
        future: Future[T] = Future()
        with watchdog(seconds + WITHOUT_LOCK):
            self._calls.put((call, future))
            return future.result(seconds)

    def close(self) -> None:
        """End the thread when it has made its calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            call, future = given
            try:
                future.set_result(call())
            except BaseException as error:  # KeyboardInterrupt of a tool
                future.set_exception(error)
