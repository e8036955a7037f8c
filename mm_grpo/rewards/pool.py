"""The pool of worker processes: started, given calls, killed at the deadline, none left at the end.

`Pool.run` makes the calls of one isolated reward in one step, within the deadline however many of them
hang, and gives an `Outcome` for each. How calls are shared out is in `scheduling.py`, a single process in
`process.py`, what runs in it in `worker.py`. Workers that are still busy when a run is over are killed and
replaced.
"""

from __future__ import annotations

import os
import selectors
import time
import weakref
from collections.abc import Sequence
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.process import Process
from mm_grpo.rewards.scheduling import TICK, Outcome, Run, Task
from mm_grpo.rewards.worker import Job

START_LIMIT = 120.0
"""Seconds that a worker may take to start and to import a function, before a step's clock runs."""


def default_size() -> int:
    """The processor cores that this process may use, shared with the other ranks of this machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdigit() else 1))


class Pool:
    """Worker processes, started when they are first needed. `close` ends them, as does the program's end."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or default_size()
        self.workers: list[Process] = []
        self._tasks: dict[str, Task] = {}
        self.chunks: dict[str, int] = {}
        self._end = weakref.finalize(self, _end_all, self.workers, os.getpid())

    def close(self) -> None:
        """End every worker; a later `run` starts new ones."""
        _end_all(self.workers, os.getpid())

    def begin(self, task: Task) -> None:
        """Start the workers that a run of the task may use, and have them import its function meanwhile."""
        self._enlist(
            task, min(self.size, task.max_workers or self.size, 1 if task.kind == "batch" else self.size)
        )

    def run(self, task: Task, jobs: Sequence[Job], *, stop_at_failure: bool = False) -> list[Outcome]:
        """Make all calls. With `stop_at_failure` the first failure ends the run, and the calls that have no
        outcome then are given as not begun. RewardError when the function cannot be imported."""
        try:
            self._prepare(task, min(self.size, len(jobs), task.max_workers or len(jobs)))
            run = Run(self, task, jobs, stop_at_failure)
            return run.outcomes()
        finally:
            self._tidy()

    def _prepare(self, task: Task, count: int) -> None:
        """Have `count` workers hold the function. Not on the step's clock."""
        self._tidy()
        ours = self._enlist(task, count)
        end = time.monotonic() + START_LIMIT
        while waiting := [worker for worker in ours if worker.loading]:
            self.wait(waiting, TICK)
            if dead := next((worker for worker in waiting if worker.poll()), None):
                raise RewardError(
                    f"reward {task.name!r}: a worker process {dead.ended} while it started or imported "
                    f"{task.load.address}; what it wrote stands above"
                )
            if time.monotonic() > end:
                raise RewardError(
                    f"reward {task.name!r}: a worker process has not imported {task.load.address} within "
                    f"{START_LIMIT:g} s"
                )

    def _enlist(self, task: Task, count: int) -> list[Process]:
        self._tasks[task.load.key] = task
        while len(self.workers) < count:
            self.workers.append(Process())
        for worker in self.workers[:count]:
            self.load(worker, task)
        return self.workers[:count]

    def load(self, worker: Process, task: Task) -> None:
        """Tell a worker to import the task's function, if it has not been told."""
        if task.load.key not in worker.loaded and task.load.key not in worker.loading:
            worker.loading.add(task.load.key)
            worker.send(task.load)

    def add(self, task: Task) -> Process:
        """One more worker, on its way to hold the function."""
        worker = Process()
        self.workers.append(worker)
        self.load(worker, task)
        return worker

    def remove(self, worker: Process) -> None:
        worker.kill()
        self.workers.remove(worker)

    def wait(self, workers: Sequence[Process], seconds: float) -> list[tuple[Process, dict[str, Any]]]:
        """What these workers answer, waiting `seconds` at most for the first of it."""
        found: list[tuple[Process, dict[str, Any]]] = []
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            for key, event in selector.select(max(0.0, seconds)):
                if event & selectors.EVENT_WRITE:
                    key.data.flush()
                    continue
                answers = self.receive(key.data)
                if not answers:
                    key.data.poll()
                found += [(key.data, answer) for answer in answers]
        return found

    def receive(self, worker: Process) -> list[dict[str, Any]]:
        """A worker's answers to calls, once those to other requests are dealt with."""
        answers = []
        for answer in worker.receive():
            if "job" in answer or "unreadable" in answer:
                answers.append(answer)
            elif "load" in answer:
                task = self._tasks[answer["load"]]
                worker.loading.discard(task.load.key)
                if "fault" in answer:
                    raise RewardError(
                        f"reward {task.name!r}: a worker process cannot import {task.load.address}: "
                        f"{answer['fault']}"
                    )
                worker.loaded.add(task.load.key)
        return answers

    def _tidy(self) -> None:
        """End what is busy, dead, set back or too many; the rest is ready for the next run."""
        lost: list[set[str]] = []
        for worker in list(self.workers):
            unfit = worker.poll() or worker.chunk or worker.slow
            if unfit or len(self.workers) > self.size:
                self.remove(worker)
                if unfit:
                    lost.append(worker.loaded | worker.loading)
        for keys in lost[: max(0, self.size - len(self.workers))]:
            self.workers.append(Process())
            for key in keys:  # so that the next step does not wait for it
                self.load(self.workers[-1], self._tasks[key])


def _end_all(workers: list[Process], owner: int) -> None:
    """End all workers; not in a fork of the process that started them."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.leave()
    end = time.monotonic() + 0.5
    for worker in workers:
        worker.kill(0.0 if worker.chunk or worker.loading else end - time.monotonic())
    workers.clear()
