"""Ends this process where a call hangs that nothing in Python can interrupt.

A regular expression or C code that holds the interpreter's lock lets no thread, signal handler or time-out of Python
run again. The timer of `faulthandler` needs no lock: it prints where every thread stands and ends the process with
exit code 1.

    with Watchdog(30.0) as watchdog:
        ...
        watchdog.restart()   # something has moved: the time counts from now

Blocks may be nested and may run in several threads; the one whose time ends first counts. Not here: what can be
stopped in a better way, such as a worker process (workers.py) or a coroutine.
"""

from __future__ import annotations

import faulthandler
import threading
import time


class Watchdog:
    """A block that may take `seconds` without `restart`; after that the process is ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._since = seconds, 0.0

    def __enter__(self) -> Watchdog:
        self._since = time.monotonic()
        with _lock:
            _running.append(self)
            _set_timer()
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _running.remove(self)
            _set_timer()

    def restart(self) -> None:
        """Count from now; does nothing in the first tenth of the time, so that it may be called often."""
        now = time.monotonic()
        if now - self._since > self.seconds / 10:
            self._since = now
            with _lock:
                _set_timer()

    @property
    def end(self) -> float:
        """When the time ends, in seconds of `time.monotonic`."""
        return self._since + self.seconds


_lock = threading.Lock()
_running: list[Watchdog] = []


def _set_timer() -> None:
    """Set the process's one timer to the first of the blocks that are running, or off. Called under the lock."""
    faulthandler.cancel_dump_traceback_later()
    if _running:
        left = min(watchdog.end for watchdog in _running) - time.monotonic()
        faulthandler.dump_traceback_later(max(left, 0.001), exit=True, file=2)
