"""Who does which call in one run of the pool, and what becomes of those that fail.

- a worker gets a few calls at a time, fewer the longer they take, and gives back one answer per call;
- when a process ends by itself, the call it was at has failed, and its other calls go to other workers;
- calls that wait behind a slow one are given to idle workers too; the first answer counts;
- when every worker is at one call for long, these are set back behind all other processes, and further
  workers make the calls that wait. So a few calls that hang do not let the others time out.

Nothing here ends a worker at the deadline: the pool does it when the run is over.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mm_grpo.errors import RewardError
from mm_grpo.rewards.checks import Checked, Fault
from mm_grpo.rewards.process import Process
from mm_grpo.rewards.worker import Calls, Job, Load, fault_from

if TYPE_CHECKING:
    from mm_grpo.rewards.pool import Pool

FURTHER = 16
"""Workers beyond the pool's size that hanging calls may bring about."""
PATIENCE = 1 / 8
"""The part of the deadline after which a call counts as slow when others wait."""
LONGEST_CHUNK = 64
CHUNK_SECONDS = 0.02
"""How long a worker should be busy with what it is given at once."""
TICK = 0.05
"""Seconds between looks at whether processes live."""


@dataclass(frozen=True)
class Task:
    """The function that a run calls, and how: the policy's deadline in seconds, retries and limits."""

    name: str
    load: Load
    kind: Literal["completion", "batch"]
    deadline: float
    retries: int = 0
    max_workers: int | None = None
    memory_limit: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a call: checked `scores` and what was `logged`; or a `fault`, an answer `refused`, or a
    process that `died`, in words; or none of them, when it had no answer at the deadline (`began` says
    whether it was begun)."""

    scores: Sequence[Checked] | None = None
    logged: Sequence[tuple[str, str, Any]] = ()
    fault: Fault | None = None
    refused: str | None = None
    died: str | None = None
    began: bool = True

    @property
    def late(self) -> bool:
        return self.scores is None and self.fault is None and self.refused is None and self.died is None

    @property
    def failed(self) -> bool:
        return self.scores is None


class Run:
    """One run of the pool: the state of `Pool.run`."""

    def __init__(self, pool: Pool, task: Task, jobs: Sequence[Job], stop_at_failure: bool) -> None:
        self.pool, self.task, self.jobs, self.stop_at_failure = pool, task, jobs, stop_at_failure
        self.waiting = deque(range(len(jobs)))
        self.found: list[Outcome | None] = [None] * len(jobs)
        self.left = len(jobs)
        self.tries = [0] * len(jobs)
        self.failed = False
        self.chunk = pool.chunks.get(task.load.key, 1)
        count = min(pool.size, len(jobs), task.max_workers or len(jobs))
        self.workers = pool.workers[:count]
        self.most = task.max_workers or pool.size + FURTHER

    def outcomes(self) -> list[Outcome]:
        end = time.monotonic() + self.task.deadline
        looked = time.monotonic()
        while self.left and not (self.failed and self.stop_at_failure):
            self.give()
            now = time.monotonic()
            if now >= end:
                break
            for worker, answer in self.pool.wait(self.workers, min(end - now, TICK)):
                self.take(worker, answer)
            if time.monotonic() - looked > TICK or any(worker.ended for worker in self.workers):
                looked = time.monotonic()
                self.bury()
                self.share()
                self.make_way()
        self.pool.chunks[self.task.load.key] = self.chunk
        at = {worker.chunk[0] for worker in self.workers if worker.chunk}
        return [
            outcome if outcome is not None else Outcome(began=number in at)
            for number, outcome in enumerate(self.found)
        ]

    def give(self) -> None:
        """Hand the calls that wait to idle workers."""
        for worker in self.workers:
            if not self.waiting:
                return
            if not worker.idle:
                continue
            fair = -(-len(self.waiting) // (2 * len(self.workers)))
            numbers: list[int] = []
            while self.waiting and len(numbers) < max(1, min(self.chunk, fair)):
                number = self.waiting.popleft()
                if self.found[number] is None:
                    numbers.append(number)
            if numbers:
                jobs = [self.jobs[number] for number in numbers]
                task = self.task
                worker.chunk, worker.shared = numbers, False
                worker.since = worker.sent = time.monotonic()
                try:
                    worker.send(Calls(task.load.key, task.kind, task.memory_limit, jobs))
                except Exception as error:  # pickle raises many kinds
                    raise RewardError(_unsendable(task, jobs, error)) from error

    def take(self, worker: Process, answer: Mapping[str, Any]) -> None:
        """An answer to one call."""
        if "unreadable" in answer:
            raise RewardError(
                f"reward {self.task.name!r}: its arguments cannot be read in a worker process: "
                f"{answer['unreadable']}. Isolated rewards take plain data and images"
            )
        number = answer["job"]
        worker.chunk.remove(number)
        worker.since = time.monotonic()
        if not worker.chunk:
            self.measure(worker.since - worker.sent)
            if worker.slow:
                self.replace(worker)
        if "scores" in answer:
            self.settle(number, Outcome(answer["scores"], answer["logged"]))
        elif "refused" in answer:
            self.settle(number, Outcome(refused=answer["refused"]))
        else:
            self.settle(number, Outcome(fault=fault_from(answer["raised"])))

    def settle(self, number: int, outcome: Outcome) -> None:
        """The first outcome of a call counts, unless it may be tried again."""
        if self.found[number] is not None:
            return
        if outcome.refused is None and outcome.failed and self.tries[number] < self.task.retries:
            self.tries[number] += 1
            self.waiting.append(number)
            return
        self.found[number] = outcome
        self.left -= 1
        self.failed = self.failed or outcome.failed

    def measure(self, seconds: float) -> None:
        """Give more at once after a quick chunk, less after a slow one."""
        if seconds < CHUNK_SECONDS / 2:
            self.chunk = min(LONGEST_CHUNK, 2 * self.chunk)
        elif seconds > 2 * CHUNK_SECONDS:
            self.chunk = max(1, self.chunk // 2)

    def bury(self) -> None:
        """Replace workers that have ended: the call each was at has failed, its others wait again."""
        for worker in [worker for worker in self.workers if worker.poll()]:
            for answer in self.pool.receive(worker):
                self.take(worker, answer)
            if not worker.chunk and worker.loading:
                raise RewardError(
                    f"reward {self.task.name!r}: a worker process {worker.ended} while it started or imported "
                    f"{self.task.load.address}; what it wrote stands above"
                )
            if worker.chunk:
                first, *others = worker.chunk
                worker.chunk = []
                if not worker.shared:
                    self.waiting.extendleft(reversed(others))
                self.settle(first, Outcome(died=worker.ended))
            if worker in self.workers:
                self.replace(worker)

    def replace(self, worker: Process) -> None:
        """End a worker; start another when there are calls for it."""
        self.workers.remove(worker)
        self.pool.remove(worker)
        if self.waiting and len(self.workers) < min(self.pool.size, self.most):
            self.workers.append(self.pool.add(self.task))

    def share(self) -> None:
        """Give calls that are stuck behind another one to idle workers too."""
        if self.waiting or not any(worker.idle for worker in self.workers):
            return
        now = time.monotonic()
        for worker in self.workers:
            if len(worker.chunk) > 1 and not worker.shared and now - worker.since > TICK:
                worker.shared = True
                self.waiting.extend(n for n in worker.chunk[1:] if self.found[n] is None)

    def make_way(self) -> None:
        """When all workers are slow and calls wait, behind them too, start as many again."""
        late = time.monotonic() - PATIENCE * self.task.deadline
        slow = [worker for worker in self.workers if worker.chunk and worker.since < late]
        if len(slow) < len(self.workers):
            return
        for worker in slow:
            if len(worker.chunk) > 1 and not worker.shared:
                worker.shared = True
                self.waiting.extend(n for n in worker.chunk[1:] if self.found[n] is None)
        more = min(len(self.waiting), self.most - len(self.workers), len(self.workers))
        if more <= 0 or all(worker.slow for worker in slow):
            return
        for worker in slow:
            worker.set_back()
        for _ in range(more):
            self.workers.append(self.pool.add(self.task))


def _unsendable(task: Task, jobs: Sequence[Job], error: Exception) -> str:
    """Which argument cannot go to a worker."""
    for job in jobs:
        for name, value in job.arguments.items():
            try:
                pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as found:
                return (
                    f"reward {task.name!r}: its argument {name!r} cannot be sent to a worker process "
                    f"({type(found).__name__}: {found}); isolated rewards take plain data and images"
                )
    return f"reward {task.name!r}: its arguments cannot be sent to a worker process: {error}"
