"""Isolated rewards: their calls made in pebble's worker processes, which are killed at the deadline.

`WorkerPool` holds the workers of each isolated reward, `Step` makes one reward's calls in one step, within its
deadline however many of them hang. Calls that are known early are made by a thread while more are added (`begin`,
`add`); the deadline counts from when all are known, and no call alone may take longer than it:

- a worker gets a few calls at a time, fewer the longer they take. Where it dies or takes long over several, these
  are made again one by one, so that only the call that is to blame fails;
- when every worker is at one call for long, further workers start for the calls that wait.

The processes are `worker_group.py`, what runs in them is `worker.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

from pebble import ProcessExpired

from mm_grpo.errors import RewardError
from mm_grpo.rewards import worker
from mm_grpo.rewards.call import Call, Fault, RewardCalls, WorkerTrace
from mm_grpo.rewards.resolve import address_of
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.rewards.worker_group import Workers, how_it_ended
from mm_grpo.timing import record
from mm_grpo.worker_processes import default_size

GRACE = 5.0
"""Seconds after the deadline in which pebble must have killed what hangs."""
FURTHER = 16
"""Workers beyond the pool's size that hanging calls may bring about."""
PATIENCE = 1 / 8
"""The part of the deadline after which a call counts as slow when others wait."""
LONGEST_CHUNK = 64
CHUNK_SECONDS = 0.02
"""How long a worker should be busy with what it is given at once."""
TICK = 0.05
Answer = Mapping[str, Any]
"""What became of a call: an answer of `Worker.answer`, or how its process `died`, or whether a `late` one began."""


def check_isolation(spec: RewardSpec) -> None:
    """RewardError when no other process can find the function or get its settings."""
    address_of(spec)
    for name, value in {**spec.made_with, **spec.bound}.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise RewardError(
                f"reward {spec.name!r} cannot be isolated: its setting {name!r} is {value!r}, which cannot "
                f"be sent to a worker process ({type(error).__name__}: {error}). Set plain values, or leave "
                f"out isolated"
            ) from None


class WorkerPool:
    """The workers of all isolated rewards: `size` for each that is called per completion, one for the others.

    They start when they are first needed. `close` ends them, as does the end of this process.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size or default_size()
        self.workers: dict[str, Workers] = {}
        self.chunks: dict[str, int] = {}
        # At exit pebble ends all workers by itself.
        weakref.finalize(self, _stop_all, self.workers, os.getpid()).atexit = False

    def start(self, specs: Iterable[RewardSpec]) -> None:
        """Start the workers of these rewards, and return while they import the functions."""
        for spec in specs:
            held = self.workers.get(spec.name)
            if held is not None and not held.pool.active:
                held.stop()
            if held is None or not held.pool.active:
                count = 1 if spec.kind == "batch" else self.size
                self.workers[spec.name] = Workers(spec, min(count, spec.options.max_concurrency or count))

    def begin(self, results: RewardCalls) -> Step:
        """The calls of an isolated reward, made in the background as they are added, until `score` gets them."""
        self.start([results.spec])
        name = results.spec.name
        step = Step(self.workers.pop(name), self.size, self.chunks.get(name, 1), results)
        step.go_ahead()
        return step

    def score(self, results: RewardCalls, step: Step | None = None, missing: Sequence[Call] = ()) -> None:
        """Make all calls of an isolated reward; of those that were begun as `step`, the ones that were `missing` there.

        RewardError when its function cannot be imported.
        """
        name = results.spec.name
        if step is None:
            self.start([results.spec])
            self.workers[name].check()
            step, missing = (
                Step(self.workers.pop(name), self.size, self.chunks.get(name, 1), results),
                results.calls,
            )
        try:
            step.take_over()
            step.groups[0].check()
            step.add(missing)
            answers = step.answers()
        finally:
            step.stopped.set()
            self.chunks[name] = step.chunk
            kept, *further = step.groups
            taken = bool(kept.busy) or name in self.workers
            for group in further + [kept] * taken:
                group.stop()
            if not taken:
                self.workers[name] = kept
            self.start([results.spec])  # so that the next step need not wait
        late = ["late" in answer for answer in answers]
        # What failed before what was late: under "stop" a failure ends the step early and leaves calls undone.
        order = [
            (late[n], not answers[n].get("late", True), step.calls[n].rows, n) for n in range(len(answers))
        ]
        for *_, number in sorted(order):
            call, answer = step.calls[number], answers[number]
            if late[number]:
                results.late(call, call.too_late(sum(late), len(late), began=answer["late"]))
            else:
                _settle(results, call, answer)

    def abandon(self, step: Step) -> None:
        """End calls that were begun and the workers that make them."""
        with suppress(Exception):  # what failed in the background is nobody's affair any more
            step.take_over()
        for group in step.groups:
            group.stop()

    def close(self) -> None:
        """End every worker; a later `score` starts new ones."""
        for thread in _stop_all(self.workers, os.getpid()):
            thread.join()


def _stop_all(workers: dict[str, Workers], owner: int) -> list[threading.Thread]:
    """Stop all workers; not in a fork of the process that started them."""
    threads = [group.stop() for group in workers.values() if os.getpid() == owner]
    workers.clear()
    return threads


# one step ----------------------------------------------------------------------------------------


class Step:
    """One reward's calls in one step. `groups` are its workers: those of the pool, and further ones.

    One thread works on them at a time: one of its own from `go_ahead` to `take_over`, then the caller's. What is noted
    here alone can be noted by any thread; the `results` are the caller's.
    """

    def __init__(self, workers: Workers, size: int, chunk: int, results: RewardCalls) -> None:
        self.results, self.spec, self.groups, self.chunk = results, results.spec, [workers], chunk
        self.calls: list[Call] = []
        self.deadline = results.spec.options.deadline or 0.0
        self.most = results.spec.options.max_concurrency or size + FURTHER
        self.waiting: deque[int] = deque()
        self.alone: set[int] = set()
        self.flying: dict[Future[str], tuple[Workers, float, list[int]]] = {}
        self.found: list[Answer | None] = []
        self.tries: list[int] = []
        self.failed, self.lost = False, 0
        self.stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._raised: BaseException | None = None
        self._seconds = 0.0
        self._added: Future[str] = Future()

    def add(self, calls: Iterable[Call]) -> None:
        """Add calls to make."""
        for call in calls:
            self.calls.append(call)
            self.found.append(None)
            self.tries.append(0)
            self.waiting.append(len(self.calls) - 1)  # last: the thread takes it from here
        self._wake()

    def go_ahead(self) -> None:
        """Make calls as they are added, in a thread."""
        self._thread = threading.Thread(target=self._work, name=f"scoring {self.spec.name}", daemon=True)
        self._thread.start()

    def take_over(self) -> None:
        """End the thread of `go_ahead`, where there is one; raises what it could not go on from."""
        if self._thread is None:
            return
        self.stopped.set()
        self._wake()
        self._thread.join()
        self._thread = None
        self.results.seconds += self._seconds
        if self._raised is not None:
            raise self._raised

    def _wake(self) -> None:
        added = self._added
        if not added.done():
            added.set_result("")

    def _work(self) -> None:
        try:
            ready = self.groups[0].ready
            while not self.stopped.is_set():
                if not ready.done():
                    wait([ready], TICK)
                    continue
                if self._added.done():
                    self._added = Future()
                start = time.monotonic()
                if not self.failed:
                    self.give(start, start + self.deadline)
                busy = bool(self.flying)
                self.wait_for([*self.flying, self._added], TICK if busy else None)
                self._seconds += (time.monotonic() - start) * busy
        except BaseException as error:
            self._raised = error

    def answers(self) -> list[Answer]:
        """An answer for each call. Under "stop" the first failure ends the step, and the calls without an
        answer then are late and not begun."""
        end = time.monotonic() + self.deadline
        while not self.failed:
            now = time.monotonic()
            if now < end:
                self.give(now, end)
            if not self.flying or now > end + GRACE:
                break
            self.wait_for(self.flying, TICK)
        began = {numbers[0] for future, (_, _, numbers) in self.flying.items() if future.running()}
        return [{"late": n in began} if answer is None else answer for n, answer in enumerate(self.found)]

    def wait_for(self, futures: Iterable[Future[str]], seconds: float | None) -> None:
        """Wait for one of some requests that fly, and settle those that have ended."""
        for future in wait(futures, seconds, FIRST_COMPLETED).done:
            if future in self.flying:
                self.take(future, *self.flying.pop(future))
        if self.flying:
            self.add_workers(time.monotonic())

    def give(self, now: float, end: float) -> None:
        """Hand the calls that wait to idle workers."""
        count = sum(group.count for group in self.groups)
        for group in self.groups:
            while self.waiting and group.busy < group.count:
                several = max(1, min(self.chunk, -(-len(self.waiting) // (2 * count))))
                numbers = [self.waiting.popleft()]
                while (
                    len(numbers) < several
                    and self.waiting
                    and self.alone.isdisjoint((numbers[0], self.waiting[0]))
                ):
                    numbers.append(self.waiting.popleft())
                limit = end - now if len(numbers) == 1 else min(end - now, PATIENCE * self.deadline)
                body = _pickled(self.spec, [self.calls[number] for number in numbers])
                future = group.pool.schedule(worker.serve, args=(body,), timeout=limit)
                self.flying[future] = group, now, numbers
                group.busy += 1

    def take(self, future: Future[str], group: Workers, since: float, numbers: list[int]) -> None:
        """Settle the calls of a request that has ended."""
        group.busy -= 1
        name = f"reward {self.spec.name}"
        record(name, f"{name}, worker", time.monotonic() - since, completions=len(numbers))
        error = future.exception()
        if error is None:
            answers = json.loads(future.result())
            if isinstance(answers, dict):
                raise RewardError(f"reward {self.spec.name!r}: {_unusable(self.spec, answers)}")
            seconds = time.monotonic() - since
            if seconds < CHUNK_SECONDS / 2:
                self.chunk = min(LONGEST_CHUNK, 2 * self.chunk)
            elif seconds > 2 * CHUNK_SECONDS:
                self.chunk = max(1, self.chunk // 2)
            for number, answer in zip(numbers, answers, strict=True):
                self.settle(number, answer)
        elif not isinstance(error, TimeoutError | ProcessExpired):  # an idle worker died, and so did the pool
            self.waiting.extendleft(reversed(numbers))
            if group in self.groups:
                self.replace(group)
        elif len(numbers) > 1:
            self.alone.update(numbers)
            self.waiting.extendleft(reversed(numbers))
        elif isinstance(error, ProcessExpired):
            self.settle(numbers[0], {"died": how_it_ended(error.exitcode)})
        else:
            self.settle(numbers[0], {"late": True})

    def replace(self, group: Workers) -> None:
        """Start anew the workers of a pool that broke."""
        self.lost += 1
        if self.lost > FURTHER:
            raise RewardError(
                f"reward {self.spec.name!r}: its worker processes die while they wait for calls; the last one "
                f"{how_it_ended(group.context.last_exit())}"
            )
        group.stop()
        self.groups[self.groups.index(group)] = Workers(self.spec, group.count)

    def settle(self, number: int, answer: Answer) -> None:
        """Note the answer to a call, unless the call may be made again."""
        if ("raised" in answer or "died" in answer) and self.tries[number] < self.spec.options.retries:
            self.tries[number] += 1
            self.waiting.append(number)
            return
        self.found[number] = answer
        action = self.results.on_timeout if "late" in answer else self.results.on_error
        self.failed = self.failed or ("scores" not in answer and action == "stop")

    def add_workers(self, now: float) -> None:
        """When every worker is at one call for long and others wait, start as many again."""
        count = sum(group.count for group in self.groups)
        more = min(len(self.waiting), self.most - count, count)
        if more > 0 and all(now - since > PATIENCE * self.deadline for _, since, _ in self.flying.values()):
            self.groups.append(Workers(self.spec, more))


def _pickled(spec: RewardSpec, calls: Sequence[Call]) -> bytes:
    """Calls as workers get them: without the logging functions, but the names of those. `samples` hold the images
    at their full size, so they go only to a function that names them."""
    jobs = []
    for call in calls:
        arguments = call.arguments()
        logs = tuple(name for name in ("log_extra", "log_metric") if arguments.pop(name, None))
        if "samples" not in spec.required + spec.optional:
            arguments.pop("samples", None)
        jobs.append(worker.Job(len(call.rows), arguments, logs))
    try:
        return pickle.dumps(jobs, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises many kinds
        for job in jobs:
            for name, value in job.arguments.items():
                try:
                    pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
                except Exception as found:
                    raise RewardError(
                        f"reward {spec.name!r}: its argument {name!r} cannot be sent to a worker process "
                        f"({type(found).__name__}: {found}); isolated rewards take plain data and images"
                    ) from None
        raise RewardError(
            f"reward {spec.name!r}: its arguments cannot be sent to a worker process"
        ) from error


def _unusable(spec: RewardSpec, answer: Answer) -> str:
    if "fault" in answer:
        return f"a worker process cannot import {address_of(spec)}: {answer['fault']}"
    return (
        f"its arguments cannot be read in a worker process: {answer['unreadable']}. Isolated rewards take plain "
        f"data and images"
    )


def _settle(results: RewardCalls, call: Call, answer: Answer) -> None:
    if "scores" in answer:
        try:
            call.log(answer["logged"])
        except RewardError as error:
            results.failed(call, call.raised(error), error)
        else:
            results.scored(call, answer["scores"])
    elif "raised" in answer:
        fault = Fault(*answer["raised"])
        results.failed(call, call.raised(fault), WorkerTrace(fault.trace))
    elif "refused" in answer:
        results.failed(call, call.refused(answer["refused"]))
    else:
        results.failed(call, RewardError(f"{call.blame()} ended its worker process, which {answer['died']}"))
