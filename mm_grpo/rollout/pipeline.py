"""When the groups of a step are made: in the step itself, or ahead of it while the learner works (max_staleness k > 0).

`Synchronous` makes them when they are asked for. `Lockstep` samples step s under weight version max(0, s - 1 - k) and
no other: a job for each step, one after the other in a thread of its own, and an update lands when every job that was
begun has ended. What is sampled follows from the schedule alone, not from the time that anything takes, so a run
repeats, on any number of servers and after it was killed. `Eager` (eager.py) waits for nothing and repeats nothing.

    version 0            1            2                       k = 1
    engine  [1][2]       [3]          [4]                     job of a step: prompts, completions, rewards, advantages
    learner       learn 1      learn 2      learn 3           update 1 lands between the jobs of 2 and of 3

The schedule is that of verl's one-step-off-policy recipe and of prime-rl, for any k. What runs where:

- main thread: the learner, weight sync, evaluation, guards, callbacks, checkpoints. An update with its checks, and an
  evaluation, come when no job runs: the checks ask the engine, and would wait behind what it samples.
- the jobs' thread: prompts (images are decoded by the threads of prefetch.py), the engine's `generate` or the loop of
  turns with its tools, rewards in the trainer's process (others have processes of their own), and the collectives of
  those, over a gloo group that only this thread uses (`Ranks.second`). Every process has the same jobs in the same
  order, so the collectives meet. Those of the main thread go over the other groups.

The engine holds its weights outside this process and may be called from both threads (`remote`, engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from mm_grpo.rollout.background import Background
from mm_grpo.rollout.collect import Collector, Rollout

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rollout.engine import RolloutEngine
    from mm_grpo.types import Group

Place = tuple[int, int]
"""(step, slot): which row is asked about, and from which seeds."""


@dataclass
class Ahead:
    """Finished work of this process that is not learned from, by the step that will learn from it.

    Of an eager run also `groups` that no step has yet, `asked`, the places of requests on their way, and by step the
    `slots` that those are to fill, with the `counts` of its prompts.
    """

    rollouts: dict[int, Rollout] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    asked: list[Place] = field(default_factory=list)
    slots: dict[int, list[int]] = field(default_factory=dict)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)


class Synchronous:
    """Makes the groups of a step when they are asked for; the engine sleeps while the learner works."""

    def __init__(self, collector: Collector, engine: RolloutEngine) -> None:
        self.collector, self.engine = collector, engine

    def begin(self, done: int, ahead: Ahead | None = None) -> None:
        """Go on after step `done`, with what a checkpoint kept of the steps ahead."""

    def take(self, step: int) -> Rollout:
        """The groups of a step, with rewards and advantages. Collective."""
        return collect_step(self.collector, Rollout(step))

    def sleep(self) -> None:
        """Free the device for the learner."""
        self.engine.sleep()

    def drain(self, step: int) -> None:
        """Wait until no request is in flight that the weights of `step` may not land in. Collective."""

    def settle(self) -> None:
        """Wait until nothing runs that an evaluation may not run beside."""

    def landed(self, step: int) -> None:
        """Called when the weights of `step` have arrived."""

    def finished(self) -> Ahead | None:
        """Return the steps ahead for a checkpoint; None where nothing is ever ahead. Collective."""
        return None

    def close(self) -> None:
        """Begin nothing more."""


class Lockstep(Synchronous):
    """Samples steps ahead under the version that the schedule says. `ranks` are those of the main thread."""

    def __init__(self, collector: Collector, engine: RolloutEngine, ranks: Ranks) -> None:
        super().__init__(collector, engine)
        self.ranks, self.staleness = ranks, collector.config.rollout.max_staleness
        self.jobs: dict[int, Future[Rollout]] = {}
        self.thread = Background(1, "mm_grpo steps ahead")
        self.current: Rollout | None = None
        self.learned = 0

    def begin(self, done: int, ahead: Ahead | None = None) -> None:
        self.learned = done
        for step, rollout in sorted(ahead.rollouts.items()) if ahead is not None else ():
            self.jobs[step] = self.thread.submit(partial(with_advantages, self.collector, rollout))

    def take(self, step: int) -> Rollout:
        self._start(step)
        return self._taken(step)

    def sleep(self) -> None:
        """The engine goes on."""

    def drain(self, step: int) -> None:
        """Wait for every job that was begun: it is to be sampled under the weights that the engine has."""
        waited = self._wait([job for _, job in sorted(self.jobs.items())])
        if self.current is not None:
            self.current.times["time/wait"] += waited

    def landed(self, step: int) -> None:
        """Begin what these weights are for, unless an evaluation comes first."""
        self.learned = step
        every = self.collector.config.run.eval_every
        if not every or step % every:
            self._start(step + 1)

    def settle(self) -> None:
        """Wait for every job that was begun: a loop of turns leads one set of conversations at a time."""
        wait_for(self.jobs.values())  # what one of them raised is raised when it is taken

    def finished(self) -> Ahead | None:
        """The steps that were sampled before the newest weights landed: the others begin anew under these."""
        kept = sorted(step for step in self.jobs if step <= self.learned + self.staleness)
        return Ahead({step: self.jobs[step].result() for step in kept})

    def close(self) -> None:
        self.thread.close()

    def _start(self, step: int) -> None:
        """Begin with the steps whose weight version the engine has when `step` is the next to be learned."""
        last = min(step + self.staleness, self.collector.max_steps)
        for ahead in range(step, last + 1):
            if ahead not in self.jobs:
                self.jobs[ahead] = self.thread.submit(
                    partial(collect_step, self.collector, Rollout(ahead), self.thread.require_open)
                )

    def _taken(self, step: int) -> Rollout:
        waited = self._wait([self.jobs[step]])
        self.current = rollout = self.jobs.pop(step).result()
        rollout.times["time/wait"] = waited
        if self.ranks.first:
            rollout.metrics |= staleness_metrics(rollout, step - 1)
        return rollout

    def _wait(self, jobs: Sequence[Future[Rollout]]) -> float:
        """Wait for jobs, and raise on every process what one of them raised; returns the seconds."""
        started = time.perf_counter()
        with self.ranks.fail_together("the steps ahead"):
            for job in jobs:
                job.result()
        return time.perf_counter() - started


def collect_step(
    collect: Collector, rollout: Rollout, going_on: Callable[[], None] = lambda: None
) -> Rollout:
    """Prompts, completions, rewards and advantages of a step, attempt after attempt. Collective.

    `going_on` is called between them, and raises when the run has ended.
    """
    for _ in range(collect.config.rollout.max_attempts):  # more than one with dynamic sampling alone
        prompts = collect.prompts(rollout)
        going_on()
        completions = collect.completions(rollout, prompts)
        going_on()
        collect.rewards(rollout, completions)
        going_on()
        if not rollout.zero_std_slots:
            break
    return with_advantages(collect, rollout)


def scheduled_version(step: int, staleness: int) -> int:
    """The weight version that a step is sampled under, in lockstep and where nothing is ahead (staleness 0).

    >>> [scheduled_version(step, 2) for step in (1, 2, 3, 4, 5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - 1 - staleness)


def oldest_version(group: Group) -> int:
    """The oldest weight version that a token of the group was sampled under."""
    return min(version for c in group.completions for _, version in c.weight_versions)


def staleness_metrics(rollout: Rollout, version: int) -> dict[str, float]:
    """Count the updates that the completions lie behind the learner, which is at `version`.

    A completion is as old as its first token; `staleness/mixed` is the share of those with several versions, and
    `staleness/dropped` counts the groups that were too old and are sampled again.
    """
    spans = [c.weight_versions for group in rollout.kept.values() for c in group.completions]
    ages = [version - span[0][1] for span in spans]
    return {
        "staleness/mean": fmean(ages),
        "staleness/max": max(ages),
        "staleness/mixed": fmean(len(span) > 1 for span in spans),
        "staleness/dropped": rollout.stale,
    }


def with_advantages(collect: Collector, rollout: Rollout) -> Rollout:
    collect.advantages(rollout)
    return rollout
