"""Isolated rewards: their calls made in worker processes, which are killed at the deadline.

`WorkerPool` holds the workers of one reward, and hands them calls from the event loop of `async_runner.py`. The workers
run `worker.py`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from mm_grpo.errors import RewardError
from mm_grpo.import_path import digest_of
from mm_grpo.rewards.arguments import arguments_of
from mm_grpo.rewards.call import Call, ExceptionText, RewardCalls, WorkerTrace
from mm_grpo.rewards.resolve import address_of
from mm_grpo.rewards.scores import Fault
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.rewards.worker import RewardSource
from mm_grpo.user_code.lazy_image import with_pil_images
from mm_grpo.user_code.workers import Outcome, Unsendable, Worker, Workers, default_size, packed

EXTRA_WORKERS = 16
"""Workers beyond the pool's size that may start while calls hang."""
SLOW_SHARE = 1 / 8
"""Share of the deadline after which a call counts as slow when others wait."""
TICK = 0.05
"""Seconds between two checks for late calls."""


def check_isolation(spec: RewardSpec) -> None:
    """Raise RewardError if no other process can import the function or get its settings."""
    address_of(spec)
    settings = {**spec.made_with, **spec.bound}
    try:
        packed(settings)
    except Unsendable as error:
        raise RewardError(
            f"reward {spec.name!r} cannot be isolated: its setting {error.name!r} is {settings[error.name]!r}, and "
            f"only plain values can be sent to a worker process ({error.why})"
        ) from None


class _Job(NamedTuple):
    call: Call
    answer: asyncio.Future[Mapping[str, Any]]


class WorkerPool:
    """Worker processes of an isolated reward: `size` for a function of one completion, else one.

    They start when first needed, and end at `close` or with this process. When all workers are busy with slow calls,
    extra ones start for the calls that wait. Only the event loop's thread may use a pool.
    """

    def __init__(self, spec: RewardSpec, size: int | None) -> None:
        limit, size = spec.options.max_concurrency, size or default_size()
        self.spec, self.size = spec, min(1 if spec.kind == "batch" else size, limit or size)
        self.max_size, self.seconds = limit or self.size + EXTRA_WORKERS, spec.options.deadline or 0.0
        self.workers = _workers(spec)
        self.jobs: dict[Worker, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    async def start(self) -> None:
        """Start the workers, and return while they import the function."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.workers.fileno(), self._poll)
        self.workers.fill(self.size)

    async def ready(self) -> None:
        """Wait until a worker is ready, or no call waits for one."""
        while self._waiting and not any(worker.ready for worker in self.workers):
            await asyncio.sleep(TICK / 10)

    async def call(self, reward: RewardCalls, call: Call) -> None:
        """Make a call in a worker and store its result. Raise RewardError if a worker cannot import the function.

        Cancelling ends the worker.
        """
        await self.start()
        job = _Job(call, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._poll()
        try:
            answer = await job.answer
        except asyncio.CancelledError:
            for worker in [worker for worker, running in self.jobs.items() if running is job]:
                self._end(worker)
            raise
        _store(reward, call, answer)

    def trim(self) -> None:
        """End the workers beyond `size`, and replace ended ones, so that the next calls need not wait."""
        for worker in list(self.workers)[self.size :]:
            self._end(worker)
        self.workers.fill(self.size)

    def close(self) -> None:
        """End every worker."""
        if self._loop is not None:
            self._loop.remove_reader(self.workers.fileno())
        self.workers.close()

    def _end(self, worker: Worker) -> None:
        self.jobs.pop(worker, None)
        self.workers.end(worker)

    def _poll(self) -> None:
        """Receive answers, and hand waiting calls to idle workers."""
        try:
            for outcome in self.workers.wait(0.0):
                self._receive(outcome)
            self._dispatch()
        except Exception as error:  # a worker cannot start, or a call cannot be made
            jobs = [*self.jobs.values(), *self._waiting]
            self._error = None if jobs else error  # for the next call
            self.jobs.clear()
            self._waiting.clear()
            self.workers.close()
            for job in jobs:
                if not job.answer.done():
                    job.answer.set_exception(error)

    def _dispatch(self) -> None:
        if self._error is not None and self._waiting:
            raise self._error
        now = time.monotonic()
        for worker in self.workers:
            while self._waiting and self._waiting[0].answer.done():  # cancelled
                self._waiting.popleft()
            if worker.idle and self._waiting:
                job = self.jobs[worker] = self._waiting.popleft()
                worker.call(_pickled(self.spec, job.call), now + self.seconds + TICK)
                if worker.out and self._loop is not None:  # the rest of a long call waits for its socket
                    self._loop.call_soon(self._poll)
        if not (self._waiting or self.jobs):
            return
        self.workers.fill(self.size)
        extra = min(len(self._waiting), self.max_size - len(self.workers), len(self.workers))
        if extra > 0 and all(w.ready and now - w.since > SLOW_SHARE * self.seconds for w in self.workers):
            self.workers.fill(len(self.workers) + extra)
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._poll()

    def _receive(self, outcome: Outcome) -> None:
        job = self.jobs.pop(outcome.worker, None)
        if job is None:  # it died while it waited for calls
            return
        answer = _read(outcome)
        if "died" in answer:
            self.workers.end(outcome.worker)  # also if it still runs, after an invalid answer
        if not job.answer.done():
            job.answer.set_result(answer)


def _workers(spec: RewardSpec) -> Workers:
    address = address_of(spec)
    source = RewardSource(address, dict(spec.made_with), digest_of(address), spec.kind, spec.options.per_turn)
    target, blame = "mm_grpo.rewards.worker:RewardWorker", f"reward {spec.name!r}: a worker process"
    return Workers(target, source, address, lambda how: RewardError(f"{blame} {how}"))


def _pickled(spec: RewardSpec, call: Call) -> bytes:
    """Pickle a call for a worker: number of rows, names of the logging functions, packed arguments."""
    arguments = {n: with_pil_images(v) for n, v in arguments_of(call.batch, spec, call.rows).items()}
    logs = tuple(name for name in ("log_extra", "log_metric") if arguments.pop(name, None))
    if "samples" not in spec.required + spec.optional:  # they hold the images at full size
        arguments.pop("samples", None)
    try:
        return pickle.dumps((len(call.rows), logs, packed(arguments)))
    except Unsendable as error:
        raise RewardError(
            f"reward {spec.name!r}: its argument {error.name!r} cannot be sent to a worker process ({error.why}); "
            "isolated rewards take plain data, images and videos"
        ) from None


def _read(outcome: Outcome) -> Mapping[str, Any]:
    """Return the answer of a `RewardWorker`, {"died": how}, or {"late": True}."""
    if outcome.late or outcome.died is not None:
        return {"late": True} if outcome.late else {"died": outcome.died}
    try:
        answer = json.loads(outcome.answer or b"")
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"died": "sent what is no answer"}


def _store(reward: RewardCalls, call: Call, answer: Mapping[str, Any]) -> None:
    """Store an answer. Raise RewardError if the worker could not read the call."""
    if "late" in answer:
        reward.fail(call.rows, call.too_late(1, 1), late=True)
    elif "unreadable" in answer:
        raise RewardError(
            f"reward {call.spec.name!r}: its arguments cannot be read in a worker process: {answer['unreadable']}. "
            "Isolated rewards take plain data, images and videos"
        )
    elif "scores" in answer:
        try:
            for loggable, name, values in answer["logged"]:
                if loggable == "extra":
                    call.batch.log_extra(call.spec, call.rows, name, values)
                else:
                    call.batch.log_metric(name, values)
        except RewardError as error:
            reward.fail(call.rows, call.raised(error), error)
        else:
            scores = answer["scores"]
            reward.set_scores(call, [Fault(**s) if isinstance(s, dict) else s for s in scores])
    elif "raised" in answer:
        text = ExceptionText(*answer["raised"])
        reward.fail(call.rows, call.raised(text), WorkerTrace(text.trace))
    elif "refused" in answer:
        reward.fail(call.rows, call.refused(Fault(answer["refused"])))
    else:
        ended = RewardError(f"{call.blame()} ended its worker process, which {answer['died']}")
        reward.fail(call.rows, ended)
