"""The trainer's side of worker processes: one call at a time each, killed at its deadline.

Reads and writes never block, because a worker may stop in the middle of either.
"""

from __future__ import annotations

import math
import os
import pickle
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_grpo.user_code.kept_state import working_folder
from mm_grpo.user_code.server import Lifeline, ended, search_path
from mm_grpo.user_code.worker import LENGTH

START_LIMIT = 120.0
"""Seconds that a worker may take to start and import its code."""
READ = 2**20
LONGEST_ANSWER = 2**30
"""Bytes of an answer, at most."""


def default_size() -> int:
    """Return this rank's share of the processor cores that this process may use."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdigit() else 1))


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a call: its `answer`, how the worker `died` (with or without a call), or `late`."""

    worker: Worker
    answer: bytes | None = None
    died: str | None = None
    late: bool = False


class Unsendable(Exception):
    """Error of a value that cannot be pickled: its `name` and `why`."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def packed(values: Mapping[str, Any]) -> bytes:
    """Pickle values by name for a worker. Raise Unsendable for the first that cannot be."""
    try:
        return pickle.dumps(dict(values), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises many kinds
        for name, value in values.items() if len(values) > 1 else ():
            packed({name: value})
        raise Unsendable(next(iter(values), "?"), f"{type(error).__name__}: {error}") from None


class Worker:
    """Worker process. `since` is when its start or current call began, `until` its deadline."""

    def __init__(self, target: str, load: bytes) -> None:
        self.ready, self.busy, self.out = False, True, memoryview(b"")
        self._read = bytearray()
        self.connection, worker_end = socket.socketpair()
        with worker_end:
            self.lifeline = Lifeline(target, worker_end)
        self.connection.setblocking(False)
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many workers as cores compute at once
        folder = working_folder() or "/"
        self._begin(pickle.dumps((environment, folder, search_path(), load)), time.monotonic() + START_LIMIT)

    @property
    def idle(self) -> bool:
        """True when it waits for a call."""
        return self.ready and not self.busy

    def call(self, body: bytes, until: float) -> None:
        """Start a call with a deadline in seconds of `time.monotonic`."""
        assert self.idle
        self._begin(body, until)

    def exchange(self) -> tuple[bytes | None, str | None]:
        """Write and read as much as possible. Return a complete frame or None, and how the process ended or None."""
        code = self.lifeline.exit_code()  # before reading: what it sent before it ended counts
        over = code is not None
        try:
            if self.out:
                self.out = self.out[self.connection.send(self.out) :]
        except BlockingIOError:
            pass
        except OSError:
            over = True
        try:
            while data := self.connection.recv(READ):
                self._read += data
                if len(self._read) >= LENGTH.size:
                    (length,) = LENGTH.unpack_from(self._read)
                    if length > LONGEST_ANSWER:
                        return None, f"sent {length} bytes, which is no answer"
                    if len(self._read) >= LENGTH.size + length:
                        self.busy, self.until = False, math.inf
                        return bytes(memoryview(self._read)[LENGTH.size :]), None
            over = True
        except BlockingIOError:
            pass
        except OSError:
            over = True
        if not over:
            return None, None
        code = self.lifeline.exit_code(0.5) if code is None else code  # it comes a moment after the end
        return None, "closed its connection" if code is None else ended(code)

    def end(self) -> None:
        """Kill the process, with everything that it started."""
        self.lifeline.end()
        self.connection.close()

    def _begin(self, body: bytes, until: float) -> None:
        self.busy, self.since, self.until = True, time.monotonic(), until
        self._read = bytearray()
        self.out = memoryview(LENGTH.pack(len(body)) + body)
        with suppress(OSError):  # `exchange` will meet the error too
            self.out = self.out[self.connection.send(self.out) :]


class Workers:
    """Processes with equal handlers: `target` ("module:function") called with `load`, named `code` in messages.

    `error` makes the exception for a worker that failed to start in a certain way. All workers end at `close`, with
    this process, or with this object.
    """

    def __init__(self, target: str, load: Any, code: str, error: Callable[[str], Exception]) -> None:
        self.target, self.code, self.error = target, code, error
        self._load, self._owner = pickle.dumps(load), os.getpid()
        self._workers: dict[Worker, int] = {}  # with the events that the selector waits for
        self._selector = selectors.EpollSelector()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers))

    def __len__(self) -> int:
        return len(self._workers)

    def start(self) -> Worker:
        """Start a worker, and return while it imports."""
        worker = Worker(self.target, self._load)
        self._workers[worker] = selectors.EVENT_READ
        for file in (worker.connection, worker.lifeline.socket):
            self._selector.register(file, selectors.EVENT_READ, worker)
        return worker

    def fill(self, size: int) -> None:
        """Start workers until there are `size`."""
        for _ in range(size - len(self)):
            self.start()

    def fileno(self) -> int:
        """Return the number of a file that is readable when `wait` has something to do."""
        return self._selector.fileno()

    def wait(self, seconds: float | None = None) -> list[Outcome]:
        """Wait until a worker answers or ends, a deadline passes, or `seconds` are over. Return results of calls.

        Workers that died or were late are ended.
        """
        now, first = time.monotonic(), min((worker.until for worker in self._workers), default=math.inf)
        limit = min(max(0.0, first - now), math.inf if seconds is None else seconds)
        for worker, events in self._workers.items():
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.out else 0)
            if mask != events:
                self._selector.modify(worker.connection, mask, worker)
                self._workers[worker] = mask
        active = {key.data for key, _ in self._selector.select(None if limit == math.inf else limit)}
        outcomes = [self._outcome(worker, worker in active) for worker in self]
        return [outcome for outcome in outcomes if outcome is not None]

    def end(self, worker: Worker) -> None:
        """End a worker. Do nothing in a fork of this process, which shares the selector."""
        if os.getpid() == self._owner and self._workers.pop(worker, None) is not None:
            for file in (worker.connection, worker.lifeline.socket):
                self._selector.unregister(file)
            worker.end()

    def close(self) -> None:
        """End all workers; `start` starts new ones."""
        for worker in self:
            self.end(worker)

    def _outcome(self, worker: Worker, active: bool) -> Outcome | None:
        answer, died = worker.exchange() if active else (None, None)
        late = answer is None and died is None and time.monotonic() > worker.until
        if died is not None or late:
            self.end(worker)
        if not worker.ready:
            self._finish_start(worker, answer, died, late)
        elif answer is not None or died is not None or late:
            return Outcome(worker, answer, died, late)
        return None

    def _finish_start(self, worker: Worker, answer: bytes | None, died: str | None, late: bool) -> None:
        """Mark a worker as ready if it replied. Raise `error` if it failed to start."""
        if answer:  # a successful start is an empty frame
            self.end(worker)
            raise self.error(f"cannot import {self.code}: {answer.decode(errors='replace')}")
        if died is not None:
            raise self.error(f"{died} while it started or imported {self.code}; what it wrote stands above")
        if late:
            raise self.error(f"has not imported {self.code} within {START_LIMIT:g} s")
        worker.ready = answer is not None
