"""Worker processes, as the trainer sees them: one call at a time each, and killed at its deadline.

Reading and writing never wait for a worker, which may stop in the midst of either.
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
"""Seconds that a worker may take to start and to import what it runs."""
READ = 2**20
LONGEST_ANSWER = 2**30
"""Bytes of an answer."""


def default_size() -> int:
    """The processor cores that this process may use, shared with the other ranks of this machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdigit() else 1))


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a call: its `answer`, or how the worker `died`, with or without a call, or that it was `late`."""

    worker: Worker
    answer: bytes | None = None
    died: str | None = None
    late: bool = False


class Unsendable(Exception):
    """A value that no other process can be given: its `name` and `why`."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def packed(values: Mapping[str, Any]) -> bytes:
    """Values by name, for a worker. Raises Unsendable."""
    try:
        return pickle.dumps(dict(values), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises many kinds
        for name, value in values.items() if len(values) > 1 else ():
            packed({name: value})
        raise Unsendable(next(iter(values), "?"), f"{type(error).__name__}: {error}") from None


class Worker:
    """One process. `until` is when what it does, its start or a call, must have ended; `since` when that began."""

    def __init__(self, target: str, load: bytes, most: int) -> None:
        self.most = most
        self.ready, self.busy, self.out = False, True, memoryview(b"")
        self._read = bytearray()
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.lifeline = Lifeline(target, theirs)
        self.connection.setblocking(False)
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many workers as cores compute at once
        folder = working_folder() or "/"
        self._begin(pickle.dumps((environment, folder, search_path(), load)), time.monotonic() + START_LIMIT)

    @property
    def idle(self) -> bool:
        """True when it waits for a call."""
        return self.ready and not self.busy

    def call(self, body: bytes, until: float) -> None:
        """Begin a call; `until` is its deadline, in seconds of `time.monotonic`."""
        assert self.idle
        self._begin(body, until)

    def exchange(self) -> tuple[bytes | None, str | None]:
        """Write and read as much as there is: a frame that has come in full, or how the process ended."""
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
                    if length > self.most:
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
        code = self.lifeline.exit_code(0.5) if code is None else code  # which comes a moment later
        return None, "closed its connection" if code is None else ended(code)

    def end(self) -> None:
        """Kill the process, with all that it started."""
        self.lifeline.end()
        self.connection.close()

    def _begin(self, body: bytes, until: float) -> None:
        self.busy, self.since, self.until = True, time.monotonic(), until
        self._read = bytearray()
        self.out = memoryview(LENGTH.pack(len(body)) + body)
        with suppress(OSError):  # whatever it is, `exchange` finds it
            self.out = self.out[self.connection.send(self.out) :]


class Workers:
    """Processes that hold the same: what `target` ("module:function") makes of `load`, in words `what`.

    A worker that cannot start raises `error`, which is given how it failed. `most` is the longest answer in bytes.
    `close` ends them all, as does the end of this process or of this object.
    """

    def __init__(
        self, target: str, load: Any, what: str, error: Callable[[str], Exception], most: int
    ) -> None:
        self.target, self.what, self.error, self.most = target, what, error, most
        self._load, self._owner = pickle.dumps(load), os.getpid()
        self._workers: dict[Worker, int] = {}  # with the events that it is waited for
        self._selector = selectors.EpollSelector()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers))

    def __len__(self) -> int:
        return len(self._workers)

    def start(self) -> Worker:
        """Start one, and return while it imports."""
        worker = Worker(self.target, self._load, self.most)
        self._workers[worker] = selectors.EVENT_READ
        for each in (worker.connection, worker.lifeline.socket):
            self._selector.register(each, selectors.EVENT_READ, worker)
        return worker

    def fill(self, size: int) -> None:
        """Start workers until there are so many."""
        for _ in range(size - len(self)):
            self.start()

    def fileno(self) -> int:
        """A file that is readable when `wait` has something to do."""
        return self._selector.fileno()

    def wait(self, seconds: float | None = None) -> list[Outcome]:
        """Wait until a worker has answered or ended, a deadline has passed, or so many seconds are over. What came of
        the calls; workers that died or were late are ended."""
        now, first = time.monotonic(), min((worker.until for worker in self._workers), default=math.inf)
        limit = min(max(0.0, first - now), math.inf if seconds is None else seconds)
        for worker, events in self._workers.items():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.out else 0)
            if wanted != events:
                self._selector.modify(worker.connection, wanted, worker)
                self._workers[worker] = wanted
        found = {key.data for key, _ in self._selector.select(None if limit == math.inf else limit)}
        outcomes = [self._look(worker, worker in found) for worker in self]
        return [outcome for outcome in outcomes if outcome is not None]

    def end(self, worker: Worker) -> None:
        """End one; not in a fork of this process, which shares the selector."""
        if os.getpid() == self._owner and self._workers.pop(worker, None) is not None:
            for each in (worker.connection, worker.lifeline.socket):
                self._selector.unregister(each)
            worker.end()

    def close(self) -> None:
        """End all; `start` starts new ones."""
        for worker in self:
            self.end(worker)

    def _look(self, worker: Worker, spoke: bool) -> Outcome | None:
        answer, died = worker.exchange() if spoke else (None, None)
        late = answer is None and died is None and time.monotonic() > worker.until
        if died is not None or late:
            self.end(worker)
        if not worker.ready:
            self._started(worker, answer, died, late)
        elif answer is not None:
            return Outcome(worker, answer)
        elif died is not None:
            return Outcome(worker, died=died)
        elif late:
            return Outcome(worker, late=True)
        return None

    def _started(self, worker: Worker, answer: bytes | None, died: str | None, late: bool) -> None:
        """Note that a worker is there, where it has said so. Raises `error` where it cannot be."""
        if answer:
            self.end(worker)
            raise self.error(f"cannot import {self.what}: {answer.decode(errors='replace')}")
        if died is not None:
            raise self.error(f"{died} while it started or imported {self.what}; what it wrote stands above")
        if late:
            raise self.error(f"has not imported {self.what} within {START_LIMIT:g} s")
        worker.ready = answer is not None
