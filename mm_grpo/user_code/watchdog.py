"""Ends this process where a call hangs that nothing in Python can interrupt.

A regular expression or C code that holds the interpreter's lock lets no thread, signal handler or time-out of Python
run again. The timer of `faulthandler` needs no lock: it prints where every thread stands and ends the process with
exit code 1. It prints no message, so a small process, started with the first block and ended with this one, prints it
just before.

    with Watchdog(30.0, "reward 'x' hangs") as watchdog:
        ...
        watchdog.restart()   # something has moved: the time counts from now

Blocks may be nested and may run in several threads; the one whose time ends first counts. Not here: what can be
stopped in a better way, such as a worker process (workers.py) or a coroutine.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext

logger = logging.getLogger("mm_grpo")

AFTER_MESSAGE = 1.0
"""Seconds between the message and the end of the process."""

START_LIMIT: float | None = 600.0
"""Seconds that the user's code may take at the start of a run: to import a file, to make an environment. None in a
worker, whose start the trainer limits."""

_REPORTER = """
import json, os, select, sys
lines, left, message = b"", None, ""
while True:
    if not select.select([0], [], [], left)[0]:
        os.write(2, ("\\n" + message + "\\n").encode("utf-8", "backslashreplace"))
        left = None
        continue
    data = os.read(0, 1 << 20)
    if not data:
        break
    *whole, lines = (lines + data).split(b"\\n")
    if whole:
        left, message = json.loads(whole[-1])
"""


class Watchdog:
    """A block that may take `seconds` without `restart`; after that `message` is printed and the process ended."""

    def __init__(self, seconds: float, message: str) -> None:
        self.seconds, self.message = seconds, message
        self._since = 0.0

    def __enter__(self) -> Watchdog:
        self._since = time.monotonic()
        with _timer.lock:
            _timer.running.append(self)
            _timer.set()
        return self

    def __exit__(self, *_: object) -> None:
        with _timer.lock:
            _timer.running.remove(self)
            _timer.set()

    def restart(self) -> None:
        """Count from now; does nothing in the first tenth of the time, so that it may be called often."""
        now = time.monotonic()
        if now - self._since > self.seconds / 10:
            self._since = now
            with _timer.lock:
                _timer.set()

    @property
    def end(self) -> float:
        """When the time ends, in seconds of `time.monotonic`."""
        return self._since + self.seconds


def at_start(what: str) -> AbstractContextManager[object]:
    """A Watchdog of START_LIMIT for the user's code `what`."""
    if START_LIMIT is None:
        return nullcontext()
    why = f"error: {what} had not ended after {START_LIMIT:g} s, so the process is ended; where it stands follows"
    return Watchdog(START_LIMIT, why)


def lock_held(what: str, remedy: str) -> str:
    """The message where `what` lets no other thread of this process run."""
    return (
        f"error: {what}, and lets nothing else of this process run (a regular expression or C code that holds the "
        f"interpreter's lock), so the process is ended; where it stands follows. {remedy}"
    )


class _Timer:
    """The process's one timer, set for the block whose time ends first, and the process that prints its message."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: list[Watchdog] = []
        self._reporter: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def set(self) -> None:
        """Set both to the first of the blocks that are running, or off. Called under the lock."""
        if self._pid != os.getpid():  # the first block, or a fork, in which no timer runs
            self._reporter, self._pid = None, os.getpid()
        if not self.running:
            faulthandler.cancel_dump_traceback_later()
            self._tell(None, "")
            return
        first = min(self.running, key=lambda watchdog: watchdog.end)
        left = max(first.end - time.monotonic(), 0.0)
        faulthandler.dump_traceback_later(left + AFTER_MESSAGE, exit=True, file=2)
        self._tell(left, first.message)

    def _tell(self, left: float | None, message: str) -> None:
        if self._reporter is None and left is not None:
            self._reporter = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REPORTER],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which may go on for a step
            )
        if self._reporter is not None and self._reporter.stdin is not None:
            try:
                self._reporter.stdin.write(json.dumps([left, message]).encode() + b"\n")
                self._reporter.stdin.flush()
            except OSError:  # it was ended; the timer still works
                logger.debug("the watchdog's reporter has ended")


_timer = _Timer()
