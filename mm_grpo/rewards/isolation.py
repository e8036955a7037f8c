"""Isolated rewards: their calls made in worker processes, which are killed at the deadline.

`WorkerPool` holds the workers of each isolated reward, `IsolatedCalls` makes one reward's calls in one step. What runs
in the workers is `worker.py`.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.import_path import digest_of
from mm_grpo.rewards.call import Call, Fault, RewardCalls, WorkerTrace
from mm_grpo.rewards.resolve import address_of
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.rewards.worker import RewardSource
from mm_grpo.user_code.workers import Outcome, Unsendable, Worker, Workers, default_size, packed

LONGEST_ANSWER = 2**30
"""Bytes of an answer, with what the function logged."""
FURTHER = 16
"""Workers beyond the pool's size that hanging calls may bring about."""
PATIENCE = 1 / 8
"""The part of the deadline after which a call counts as slow when others wait."""
TICK = 0.05


def check_isolation(spec: RewardSpec) -> None:
    """RewardError when no other process can find the function or get its settings."""
    address_of(spec)
    settings = {**spec.made_with, **spec.bound}
    try:
        packed(settings)
    except Unsendable as error:
        raise RewardError(
            f"reward {spec.name!r} cannot be isolated: its setting {error.name!r} is {settings[error.name]!r}, and "
            f"only plain values can be sent to a worker process ({error.why})"
        ) from None


class WorkerPool:
    """The workers of all isolated rewards: `size` for each that is called per completion, one for the others. They
    start when they are first needed. `close` ends them, as does the end of this process."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or default_size()
        self.workers: dict[str, Workers] = {}

    def start(self, specs: Iterable[RewardSpec]) -> None:
        """Start the workers of these rewards, and return while they import the functions."""
        for spec in specs:
            if spec.name not in self.workers:
                self.workers[spec.name] = _workers(spec)
            self.workers[spec.name].fill(self._count(spec))

    def begin(self, results: RewardCalls) -> IsolatedCalls:
        """The calls of an isolated reward, made in the background as they are added, until `finish`."""
        self.start([results.spec])
        spec = results.spec
        return IsolatedCalls(results, self.workers.pop(spec.name), self._count(spec))

    def finish(self, calls: IsolatedCalls) -> None:
        """Wait for the answers, and note them. RewardError when the function cannot be imported."""
        name = calls.results.spec.name
        calls.finish()
        if self.workers.setdefault(name, calls.workers) is not calls.workers:
            calls.workers.close()
        calls.note()

    def close(self) -> None:
        """End every worker; a later `begin` starts new ones."""
        for workers in self.workers.values():
            workers.close()
        self.workers.clear()

    def _count(self, spec: RewardSpec) -> int:
        count = 1 if spec.kind == "batch" else self.size
        return min(count, spec.options.max_concurrency or count)


class IsolatedCalls:
    """One reward's calls in one step, which any of its `workers` may make: `size` of them are kept.

    They are made in a thread as they are added; the deadline counts from `finish`, when all are known, and no call
    alone may take longer than it. When every worker is at one call for long, further workers start for the calls that
    wait. What is found in the thread is noted here; the `results` are the caller's.
    """

    def __init__(self, results: RewardCalls, workers: Workers, size: int) -> None:
        options = results.spec.options
        self.results, self.spec, self.workers, self.size = results, results.spec, workers, size
        self.most, self.seconds = options.max_concurrency or size + FURTHER, options.deadline or 0.0
        self.calls: list[Call] = []
        self.found: list[Mapping[str, Any] | None] = []
        self.busy = 0.0
        """Seconds before `finish` in which any call was under way."""
        self.failed = False
        self._waiting: deque[int] = deque()
        self._settled = 0
        self._flying: dict[Worker, int] = {}
        self._all_added = self._abandoned = False
        self._end: float | None = None
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="calls of workers", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> set[int]:
        """The numbers of the calls that have begun and not ended."""
        return set(self._flying.values())

    def add_calls(self, calls: Iterable[Call]) -> None:
        """Add calls to make."""
        for call in calls:
            self.calls.append(call)
            self.found.append(None)
            self._waiting.append(len(self.calls) - 1)  # last: the thread takes it from here
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

    def note(self) -> None:
        """Give the `results` what was found."""
        self.results.seconds += self.busy
        under_way = self.under_way
        late: list[tuple[Call, bool]] = []
        # What failed before what was late: under "stop" a failure ends the step early and leaves calls undone.
        for number in sorted(range(len(self.calls)), key=lambda n: self.calls[n].rows):
            call, answer = self.calls[number], self.found[number]
            if answer is None or "late" in answer:
                late.append((call, answer is not None or number in under_way))
            else:
                _settle(self.results, call, answer)
        for call, began in sorted(late, key=lambda one: not one[1]):
            self.results.late(call, call.too_late(len(late), len(self.calls), began=began))

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
            self.workers.fill(self.size)  # so that the next calls need not wait
        except BaseException as error:
            self._raised = error

    def _over(self, now: float) -> bool:
        if self._all_added and self._end is None and any(worker.ready for worker in self.workers):
            self._end = now + self.seconds
        late = self._end is not None and now >= self._end
        done = self.failed or late or self._settled == len(self.calls)
        return self._abandoned or (self._all_added and done)

    def _give(self, now: float) -> None:
        """Hand the calls that wait to idle workers."""
        if self.failed:
            return
        self.workers.fill(self.size)
        for worker in self.workers:
            if worker.idle and self._waiting:
                number = self._waiting.popleft()
                self._flying[worker] = number
                worker.call(_pickled(self.spec, self.calls[number]), self._end or now + self.seconds)
        more = min(len(self._waiting), self.most - len(self.workers), len(self.workers))
        if more > 0 and all(w.ready and now - w.since > PATIENCE * self.seconds for w in self.workers):
            self.workers.fill(len(self.workers) + more)

    def _take(self, outcome: Outcome) -> None:
        number = self._flying.pop(outcome.worker, None)
        if number is None:  # it died while it waited for calls
            return
        if outcome.unread:  # made again
            self._waiting.append(number)
            return
        self._settled += 1
        answer = self.found[number] = _read(outcome)
        if "died" in answer:
            self.workers.end(outcome.worker)  # also where it goes on after what was no answer
        if "unreadable" in answer:
            raise RewardError(
                f"reward {self.spec.name!r}: its arguments cannot be read in a worker process: "
                f"{answer['unreadable']}. Isolated rewards take plain data and images"
            )
        action = self.results.on_timeout if "late" in answer else self.results.on_error
        self.failed = self.failed or ("scores" not in answer and action == "stop")


def _workers(spec: RewardSpec) -> Workers:
    address = address_of(spec)
    source = RewardSource(address, dict(spec.made_with), digest_of(address), spec.kind, spec.options.per_turn)
    target, blame = "mm_grpo.rewards.worker:RewardWorker", f"reward {spec.name!r}: a worker process"
    return Workers(target, source, address, lambda how: RewardError(f"{blame} {how}"), LONGEST_ANSWER)


def _pickled(spec: RewardSpec, call: Call) -> bytes:
    """A call as a worker gets it: with the names of the logging functions, and `samples`, which hold the images at
    their full size, only where the function names them."""
    arguments = call.arguments()
    logs = tuple(name for name in ("log_extra", "log_metric") if arguments.pop(name, None))
    if "samples" not in spec.required + spec.optional:
        arguments.pop("samples", None)
    try:
        return pickle.dumps((len(call.rows), logs, packed(arguments)))
    except Unsendable as error:
        raise RewardError(
            f"reward {spec.name!r}: its argument {error.name!r} cannot be sent to a worker process ({error.why}); "
            "isolated rewards take plain data and images"
        ) from None


def _read(outcome: Outcome) -> Mapping[str, Any]:
    """An answer of `RewardWorker`, or how the process `died`, or that it was `late`."""
    if outcome.late or outcome.died is not None:
        return {"late": True} if outcome.late else {"died": outcome.died}
    try:
        answer = json.loads(outcome.answer or b"")
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"died": "sent what is no answer"}


def _settle(results: RewardCalls, call: Call, answer: Mapping[str, Any]) -> None:
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
