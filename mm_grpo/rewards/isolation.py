"""Isolated rewards: their calls made in pebble's worker processes, which are killed at the deadline.

`WorkerPool` holds the workers of each isolated reward, `_Step` makes one reward's calls in one step, within its
deadline however many of them hang:

- a worker gets a few calls at a time, fewer the longer they take. Where it dies or takes long over several, these
  are made again one by one, so that only the call that is to blame fails;
- when every worker is at one call for long, further workers start for the calls that wait.

The processes are worker_processes.py, what runs in them is `worker.py`.
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
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

import pebble.pool.process
from pebble import ProcessExpired, ProcessPool

from mm_grpo.errors import RewardError
from mm_grpo.import_path import digest_of
from mm_grpo.rewards import worker
from mm_grpo.rewards.call import Call, Fault, RewardCalls, WorkerTrace
from mm_grpo.rewards.resolve import address_of
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.worker_processes import START_LIMIT, WorkerProcess, default_size, ended, preload

# pebble measures by the wall clock, and would end every call when that is set forward
pebble.pool.process.time = SimpleNamespace(time=time.monotonic, sleep=time.sleep)  # type: ignore[attr-defined,assignment]

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
EXITED_WITH_0 = 256
"""What pebble is given as the exit code of a worker that exited with 0, which it would not report."""

preload(__name__)

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
            ) from error


# the processes -----------------------------------------------------------------------------------


class PebbleProcess(WorkerProcess):
    """A worker as pebble handles it: its death is always seen."""

    _seen_dead = False

    def terminate(self) -> None:
        self._seen_dead = self._seen_dead or os.getpid() == getattr(self, "_parent_pid", None)
        super().terminate()

    def is_alive(self) -> bool:
        if super().is_alive():
            return True
        self._kill(os.killpg)
        # Pebble drops a death whose task it has not seen begin; until its next look, in 0.1 s, it will have.
        self._seen_dead, seen = True, self._seen_dead
        return not seen

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return EXITED_WITH_0 if code == 0 else code


class _Context(ForkServerContext):
    """The multiprocessing context of one pool; `processes` are the workers that it has started."""

    def __init__(self) -> None:
        self.processes: list[PebbleProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> PebbleProcess:  # type: ignore[override]
        self.processes.append(PebbleProcess(*args, **kwargs))
        return self.processes[-1]

    def last_exit(self) -> int:
        """The exit code of the latest worker that has ended."""
        return next((p.exitcode for p in reversed(self.processes) if p.exitcode is not None), EXITED_WITH_0)


def _ended(code: int) -> str:
    """How a worker ended, for a message."""
    return ended(code % EXITED_WITH_0 if code >= 0 else code)


class Workers:
    """The `count` worker processes of one reward. They start at once; `ready` has a result when one of them has
    imported the function."""

    def __init__(self, spec: RewardSpec, count: int) -> None:
        self.spec, self.count, self.busy = spec, count, 0
        load = worker.Load(
            address_of(spec),
            dict(spec.made_with),
            digest_of(address_of(spec)),
            spec.kind,
            spec.options.memory_limit,
        )
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many workers as cores compute at once
        self.context = _Context()
        self.pool = ProcessPool(
            count, initializer=worker.start, initargs=(load, environment), context=self.context
        )
        self.ready = self.pool.schedule(worker.ready)

    def check(self) -> None:
        """Wait until a worker has imported the function; RewardError when none can."""
        name, address = self.spec.name, address_of(self.spec)
        try:
            fault = self.ready.result(START_LIMIT)
        except TimeoutError:
            words = f"has not imported {address} within {START_LIMIT:g} s"
        except Exception:
            ended = _ended(self.context.last_exit())
            words = f"{ended} while it started or imported {address}; what it wrote stands above"
        else:
            if not fault:
                return
            words = f"cannot import {address}: {fault}"
        raise RewardError(f"reward {name!r}: a worker process {words}")

    def stop(self) -> threading.Thread:
        """Kill the workers, in a thread that waits for pebble's own."""
        self.pool.stop()  # type: ignore[no-untyped-call]
        thread = threading.Thread(target=self.pool.join, daemon=True)
        thread.start()
        return thread


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

    def score(self, results: RewardCalls) -> None:
        """Make all calls of an isolated reward. RewardError when its function cannot be imported."""
        name = results.spec.name
        self.start([results.spec])
        self.workers[name].check()
        step = _Step(self.workers.pop(name), self.size, self.chunks.get(name, 1), results)
        try:
            answers = step.answers()
        finally:
            self.chunks[name] = step.chunk
            kept, *further = step.groups
            for group in further + [kept] * bool(kept.busy):
                group.stop()
            if not kept.busy:
                self.workers[name] = kept
            self.start([results.spec])  # so that the next step need not wait
        late = ["late" in answer for answer in answers]
        # What failed before what was late: under "stop" a failure ends the step early and leaves calls undone.
        for number in sorted(range(len(answers)), key=lambda n: (late[n], not answers[n].get("late", True))):
            call, answer = results.calls[number], answers[number]
            if late[number]:
                results.late(call, call.too_late(sum(late), len(late), began=answer["late"]))
            else:
                _settle(results, call, answer)

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


class _Step:
    """One reward's calls in one step. `groups` are its workers: those of the pool, and further ones."""

    def __init__(self, workers: Workers, size: int, chunk: int, results: RewardCalls) -> None:
        self.spec, self.calls, self.groups, self.chunk = results.spec, results.calls, [workers], chunk
        self.stop = results.on_error == "stop"
        self.deadline = results.spec.options.deadline or 0.0
        self.most = results.spec.options.max_concurrency or size + FURTHER
        self.waiting = deque(range(len(self.calls)))
        self.alone: set[int] = set()
        self.flying: dict[Future[str], tuple[Workers, float, list[int]]] = {}
        self.found: list[Answer | None] = [None] * len(self.calls)
        self.tries = [0] * len(self.calls)
        self.failed, self.lost = False, 0

    def answers(self) -> list[Answer]:
        """An answer for each call. Under "stop" the first failure ends the step, and the calls without an
        answer then are late and not begun."""
        end = time.monotonic() + self.deadline
        while not (self.failed and self.stop):
            now = time.monotonic()
            if now < end:
                self.give(now, end)
            if not self.flying or now > end + GRACE:
                break
            for future in wait(self.flying, TICK, FIRST_COMPLETED).done:
                self.take(future, *self.flying.pop(future))
            self.add_workers(time.monotonic())
        began = {numbers[0] for future, (_, _, numbers) in self.flying.items() if future.running()}
        return [{"late": n in began} if answer is None else answer for n, answer in enumerate(self.found)]

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
            self.settle(numbers[0], {"died": _ended(error.exitcode)})
        else:
            self.settle(numbers[0], {"late": True})

    def replace(self, group: Workers) -> None:
        """Start anew the workers of a pool that broke."""
        self.lost += 1
        if self.lost > FURTHER:
            raise RewardError(
                f"reward {self.spec.name!r}: its worker processes die while they wait for calls; the last one "
                f"{_ended(group.context.last_exit())}"
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
        self.failed = self.failed or "scores" not in answer

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
                    ) from found
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
