"""The ways to make a reward's calls, and the tally that applies its policy to what comes of them.

- `run_plain`: plain functions in the trainer's process, one call after the other; with a time-out in a
  thread, which can be waited for but not ended, so that a time-out there stops the run;
- `run_isolated`: in worker processes (`pool.py`), which are killed at the deadline;
- async functions in the trainer's process: `loop.py`.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.calls import Call
from mm_grpo.rewards.checks import Checked, WorkerTrace
from mm_grpo.rewards.places import address_of, digest_of
from mm_grpo.rewards.policy import Action
from mm_grpo.rewards.registry import RewardSpec

if TYPE_CHECKING:
    from mm_grpo.rewards.pool import Pool
    from mm_grpo.rewards.scheduling import Outcome, Task

FAILURES = (Exception, SystemExit)
"""A reward that calls sys.exit() has failed too; it must not end the run as a success."""


@dataclass
class Tally:
    """One reward's answers while they come in: n scores, and the rows without one for a fault.

    `on_error` and `on_timeout` are the policies in force; under "stop" a fault is raised at once.
    """

    spec: RewardSpec
    on_error: Action
    on_timeout: Action
    scores: list[float | None]
    errors: dict[int, RewardError] = field(default_factory=dict)
    timeouts: dict[int, RewardError] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def masked(self) -> tuple[dict[int, RewardError], dict[int, RewardError]]:
        """The rows without a score for an error, and for a time-out."""
        return self.errors, self.timeouts

    def answered(self, call: Call, answer: Any) -> None:
        """The raw answer of a call in this process."""
        try:
            checked = call.checked(answer)
        except RewardError as fault:
            self.failed(call, fault)
        else:
            self.scored(call, checked)

    def scored(self, call: Call, checked: Sequence[Checked]) -> None:
        for row, value in zip(call.rows, checked, strict=True):
            if isinstance(value, str):
                self._fault(self.on_error, self.errors, (row,), call.refused(value, row))
            else:
                self.scores[row] = value

    def failed(self, call: Call, fault: RewardError, cause: BaseException | None = None) -> None:
        """A call that raised, died or answered with no scores: a fault of all its completions."""
        self._fault(self.on_error, self.errors, call.rows, fault, cause)

    def late(self, call: Call, fault: RewardError) -> None:
        """A call without an answer at the deadline."""
        self._fault(self.on_timeout, self.timeouts, call.rows, fault)

    @staticmethod
    def _fault(
        action: Action,
        kept: dict[int, RewardError],
        rows: Sequence[int],
        fault: RewardError,
        cause: BaseException | None = None,
    ) -> None:
        if action == "stop":
            raise fault from cause
        kept.update(dict.fromkeys(rows, fault))


# in the trainer's process ------------------------------------------------------------------------


def run_plain(spec: RewardSpec, calls: Sequence[Call], tally: Tally) -> None:
    """Call a plain function for each call, in order."""
    start = time.perf_counter()
    try:
        if spec.policy.deadline is None:
            for call in calls:
                _one(call, tally)
        else:
            _in_thread(spec, calls, tally, spec.policy.deadline)
    finally:
        tally.seconds = time.perf_counter() - start


def _one(call: Call, tally: Tally) -> None:
    for tries_left in range(call.spec.policy.retries, -1, -1):
        try:
            answer = call()
        except FAILURES as error:
            if not tries_left:
                tally.failed(call, call.raised(error), error)
        else:
            tally.answered(call, answer)
            return


def _in_thread(spec: RewardSpec, calls: Sequence[Call], tally: Tally, deadline: float) -> None:
    done = 0
    raised: list[BaseException] = []

    def work() -> None:
        nonlocal done
        try:
            for call in calls:
                _one(call, tally)
                done += 1
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name=f"reward {spec.name}", daemon=True)
    thread.start()
    thread.join(deadline)
    if raised:
        raise raised[0]
    if thread.is_alive():
        raise RewardError(
            f"{calls[min(done, len(calls) - 1)].blame()} had not answered after timeout = {deadline:g} s. A "
            f"plain function runs in the trainer's process, in a thread that cannot be killed, so the run "
            f"stops. With isolated: true it runs in a process that can, and on_timeout: mask goes on"
        )


# in worker processes -----------------------------------------------------------------------------


def check_isolation(spec: RewardSpec) -> None:
    """RewardError when no other process can find the function or be told its settings."""
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


def task_of(spec: RewardSpec) -> Task:
    """What the pool has to know of an isolated reward."""
    from mm_grpo.rewards.scheduling import Task
    from mm_grpo.rewards.worker import Load

    policy, address = spec.policy, address_of(spec)
    assert policy.deadline is not None
    key = f"{address} {dict(spec.made_with)!r}"
    return Task(
        spec.name,
        Load(key, address, dict(spec.made_with), digest_of(address)),
        spec.kind,
        policy.deadline,
        policy.retries,
        policy.max_concurrency,
        policy.memory_limit,
    )


def run_isolated(spec: RewardSpec, calls: Sequence[Call], tally: Tally, pool: Pool) -> None:
    """Make the calls in worker processes, within the reward's deadline."""
    from mm_grpo.rewards.worker import Job

    start, task = time.perf_counter(), task_of(spec)
    jobs = [Job(number, len(call.rows), *_plain_arguments(call)) for number, call in enumerate(calls)]
    try:
        outcomes = pool.run(task, jobs, stop_at_failure=tally.on_error == "stop")
    finally:
        tally.seconds = time.perf_counter() - start
    late = sum(outcome.late for outcome in outcomes)
    # What failed before what was late: under "stop" a failure ends the run early and leaves calls undone.
    for call, outcome in sorted(
        zip(calls, outcomes, strict=True), key=lambda one: (one[1].late, not one[1].began)
    ):
        if outcome.late:
            tally.late(call, too_late(spec, call, late, len(calls), began=outcome.began))
        else:
            _settle(call, outcome, tally)


def _settle(call: Call, outcome: Outcome, tally: Tally) -> None:
    if outcome.scores is not None:
        try:
            call.log(outcome.logged)
        except RewardError as error:
            tally.failed(call, call.raised(error), error)
        else:
            tally.scored(call, outcome.scores)
    elif outcome.fault is not None:
        tally.failed(call, call.raised(outcome.fault), WorkerTrace(outcome.fault.trace))
    elif outcome.refused is not None:
        tally.failed(call, call.refused(outcome.refused))
    else:
        tally.failed(call, RewardError(f"{call.blame()} ended its worker process, which {outcome.died}"))


def _plain_arguments(call: Call) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """A call's arguments without the logging functions, and the names of those. `samples` hold the images
    at their full size, so they go only to a function that names them."""
    arguments = call.arguments()
    logs = tuple(name for name in ("log_extra", "log_metric") if name in arguments)
    for name in logs:
        del arguments[name]
    if "samples" not in call.spec.required + call.spec.optional:
        arguments.pop("samples", None)
    return arguments, logs


def too_late(spec: RewardSpec, call: Call, late: int, of: int, *, began: bool = True) -> RewardError:
    also = f"; {late} of {of} calls had not" if of > 1 else ""
    waited = "" if began else " (nor had it been begun, for others took the time)"
    return RewardError(
        f"{call.blame()} had not answered after timeout = {spec.policy.deadline:g} s{waited}{also}. Give the "
        f"reward a longer timeout, or set on_timeout: mask to go on without such completions"
    )
