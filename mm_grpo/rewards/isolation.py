"""Isolated rewards: their calls made in worker processes, which are killed at the deadline.

`WorkerPool` holds the workers of each isolated reward, `IsolatedCalls` makes one reward's calls in one step. What runs
in the workers is `worker.py`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.import_path import digest_of
from mm_grpo.rewards.call import Call, Fault, RewardCalls, WorkerTrace
from mm_grpo.rewards.resolve import address_of
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.rewards.worker import RewardSource
from mm_grpo.timing import record
from mm_grpo.user_code.pool import PooledCalls, fill
from mm_grpo.user_code.workers import Outcome, Unsendable, Workers, default_size, packed

LONGEST_ANSWER = 2**30
"""Bytes of an answer, with what the function logged."""


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
            fill(self.workers[spec.name], self._count(spec))

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


class IsolatedCalls(PooledCalls):
    """One reward's calls in one step. What is found in the background is noted here; the `results` are the caller's."""

    def __init__(self, results: RewardCalls, workers: Workers, size: int) -> None:
        self.results, self.spec = results, results.spec
        self.calls: list[Call] = []
        self.found: list[Mapping[str, Any] | None] = []
        options = results.spec.options
        super().__init__(workers, size, options.max_concurrency, options.deadline or 0.0)

    def add_calls(self, calls: Iterable[Call]) -> None:
        """Add calls to make."""
        first = len(self.calls)
        for call in calls:
            self.calls.append(call)
            self.found.append(None)
        self.add(range(first, len(self.calls)))

    def body(self, number: int) -> bytes:
        return _pickled(self.spec, self.calls[number])

    def settle(self, number: int, outcome: Outcome) -> bool:
        name = f"reward {self.spec.name}"
        record(name, f"{name}, worker", outcome.seconds, completions=len(self.calls[number].rows))
        answer = _read(outcome)
        if "died" in answer:
            self.workers.end(outcome.worker)  # also where it goes on after what was no answer
        if "unreadable" in answer:
            raise RewardError(
                f"reward {self.spec.name!r}: its arguments cannot be read in a worker process: "
                f"{answer['unreadable']}. Isolated rewards take plain data and images"
            )
        self.found[number] = answer
        action = self.results.on_timeout if "late" in answer else self.results.on_error
        return "scores" in answer or action == "mask"

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
