"""Deadlines for user code in the trainer's process, whose threads can be waited for but not killed.

A regular expression or C code that holds the interpreter's lock lets no thread, signal handler or time-out of Python
run again. The timer of `faulthandler` needs no lock: it prints where every thread stands and ends the process with
exit code 1.

Blocks may be nested and may run in several threads; the one whose time ends first counts. Not here: what can be
stopped in a better way, such as a worker process (workers.py) or a coroutine.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mm_grpo.background import BackgroundThreads

T = TypeVar("T")
LOCK_GRACE = 5.0
"""Seconds after a deadline in which this process must notice it; then the watchdog ends the process."""

_lock = threading.Lock()
_ends: list[float] = []
"""Deadlines of the running blocks, in seconds of `time.monotonic`."""


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer than `seconds`."""
    end = time.monotonic() + seconds
    with _lock:
        _ends.append(end)
        _set_timer()
    try:
        yield
    finally:
        with _lock:
            _ends.remove(end)
            _set_timer()


def call_within(seconds: float, thread: BackgroundThreads, call: Callable[[], T]) -> T:
    """Return the result of a call made in the thread. Raise TimeoutError after `seconds`: the thread is lost then."""
    with watchdog(seconds + LOCK_GRACE):
        return thread.submit(call).result(seconds)


def _set_timer() -> None:
    """Set the process's one timer to the first deadline, or off. Call it under the lock."""
    faulthandler.cancel_dump_traceback_later()
    if _ends:
        faulthandler.dump_traceback_later(max(min(_ends) - time.monotonic(), 0.001), exit=True, file=2)
