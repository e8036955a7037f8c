"""Calls that any of several workers may make, within one deadline however many of them hang.

They are made in a thread as they are added; the deadline counts from `finish`, when all are known, and no call alone
may take longer than it. When every worker is at one call for long, further workers start for the calls that wait.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from mm_grpo.user_code.workers import Outcome, Worker, Workers

FURTHER = 16
"""Workers beyond the pool's size that hanging calls may bring about."""
PATIENCE = 1 / 8
"""The part of the deadline after which a call counts as slow when others wait."""
TICK = 0.05


class PooledCalls(ABC):
    """Calls by number, made by `workers`, of which `size` are kept and there are `most`, within `seconds`.

    `busy` are the seconds before `finish` in which any was under way. At the end `under_way` are the numbers of those
    that had begun and not ended.
    """

    def __init__(self, workers: Workers, size: int, most: int | None, seconds: float) -> None:
        self.workers, self.size, self.most, self.seconds = workers, size, most or size + FURTHER, seconds
        self.busy = 0.0
        self.failed = False
        self._waiting: deque[int] = deque()
        self._added = self._settled = 0
        self._flying: dict[Worker, int] = {}
        self._all_added = self._abandoned = False
        self._end: float | None = None
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="calls of workers", daemon=True)
        self._thread.start()

    @abstractmethod
    def body(self, number: int) -> bytes:
        """The call of that number, for a worker."""

    @abstractmethod
    def settle(self, number: int, outcome: Outcome) -> bool:
        """Note what came of a call; False when nothing more is to begin. In another thread."""

    @property
    def under_way(self) -> set[int]:
        """The calls that have begun and not ended."""
        return set(self._flying.values())

    def add(self, numbers: Iterable[int]) -> None:
        """Add calls to make."""
        for number in numbers:
            self._added += 1
            self._waiting.append(number)  # last: the thread takes it from here
        self.workers.wake()

    def finish(self) -> None:
        """Wait until all calls were made, or one was to stop the others, or the time has passed; those that are under
        way then are ended. Raises what a call could not be made for."""
        self._all_added = True
        self.workers.wake()
        try:
            self._thread.join()
        except BaseException:
            self.abandon()
            raise
        if self._raised is not None:
            self.workers.close()
            raise self._raised

    def abandon(self) -> None:
        """End the calls and the workers."""
        self._abandoned = True
        self.workers.wake()
        self._thread.join()
        self.workers.close()

    def _work(self) -> None:
        try:
            while not self._over(now := time.monotonic()):
                self._give(now)
                waited = TICK if self._waiting and not self.failed else None
                if self._end is not None:
                    waited = min(self._end - now, waited or self.seconds)
                flying = bool(self._flying)
                for outcome in self.workers.wait(waited):
                    self._take(outcome)
                if flying and not self._all_added:
                    self.busy += time.monotonic() - now
            if self._abandoned:
                return
            for number, worker in enumerate(self.workers):  # those that hang and those that are too many
                if worker in self._flying or number >= self.size:
                    self.workers.end(worker)
            fill(self.workers, self.size)  # so that the next calls need not wait
        except BaseException as error:
            self._raised = error

    def _over(self, now: float) -> bool:
        if self._all_added and self._end is None and any(worker.ready for worker in self.workers):
            self._end = now + self.seconds
        late = self._end is not None and now >= self._end
        done = self.failed or late or self._settled == self._added
        return self._abandoned or (self._all_added and done)

    def _give(self, now: float) -> None:
        """Hand the calls that wait to idle workers."""
        if self.failed:
            return
        fill(self.workers, self.size)
        for worker in self.workers:
            if worker.idle and self._waiting:
                number = self._waiting.popleft()
                self._flying[worker] = number
                worker.call(self.body(number), self._end or now + self.seconds)
        more = min(len(self._waiting), self.most - len(self.workers), len(self.workers))
        if more > 0 and all(w.ready and now - w.since > PATIENCE * self.seconds for w in self.workers):
            fill(self.workers, len(self.workers) + more)

    def _take(self, outcome: Outcome) -> None:
        number = self._flying.pop(outcome.worker, None)
        if number is None:  # it died while it waited for calls
            return
        if outcome.unread:  # made again
            self._waiting.append(number)
            return
        self._settled += 1
        self.failed = not self.settle(number, outcome) or self.failed


def fill(workers: Workers, size: int) -> None:
    """Start workers until there are so many."""
    for _ in range(size - len(workers)):
        workers.start()
