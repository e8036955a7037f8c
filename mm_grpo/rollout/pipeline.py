"""When the groups of a step are made: in the step itself, or ahead of it while the learner works (max_staleness k > 0).

`Synchronous` makes them when they are asked for. `Lockstep` samples step s under weight version max(0, s - 1 - k) and
no other: a job for each step, one after the other in a thread of its own, and an update lands when every job that was
begun has ended. What is sampled follows from the schedule alone, not from the time that anything takes, so a run
repeats, on any number of servers and after it was killed. `Eager` waits for nothing and repeats nothing.

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
- of an eager run also a thread for each group that is on its way, which makes one call of the engine's `generate` and
  no collectives; the main thread makes the prompts of first attempts.

The engine holds its weights outside this process and may be called from all these threads (`remote`, engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from threading import Condition
from typing import TYPE_CHECKING

from mm_grpo.rollout.background import Background
from mm_grpo.rollout.collect import Collector, Rollout, counts_of, groups_of
from mm_grpo.rollout.engine import requests_for, require_answers
from mm_grpo.timing import timed

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rollout.engine import RolloutEngine
    from mm_grpo.types import Group, Prompt

Place = tuple[int, int]
"""(step, slot): which row is asked about, and from which seeds."""
MOST_THREADS = 128
"""Groups that one process of an eager run asks for at once."""
LOOK = 1.0
"""Seconds after which a thread that waits looks whether the run has ended."""


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
            self.jobs[step] = self.thread.submit(partial(self.collector.advantages, rollout))

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


class Eager(Lockstep):
    """Learns from the groups that finish first. `version` gives the number of the weights that the engine holds.

    The requests of a step go out as soon as the weights of the step k + 1 before it have been sent, so at most k + 1
    steps' worth is on its way or waits to be learned (AReaL's bound), and nobody waits for anybody else: a step learns
    from the groups that finished first, whole, whichever step asked for them, and as many as it has prompts. They take
    its slots, and `Group.place` says whose row and seeds each has. A group with a token that is more than k updates old
    when its step comes is dropped and counted, and its place is asked for again, with the same row and seeds, so no row
    is lost; rows that take long are dropped more often.

    An update is sent as soon as the learner has made it. Where the engine says that it can (`updates_in_flight`) it
    lands in mid-generation, and completions have a span for each version; else it waits until no request is under way,
    and no new one begins.
    """

    def __init__(
        self, collector: Collector, engine: RolloutEngine, ranks: Ranks, version: Callable[[], int]
    ) -> None:
        super().__init__(collector, engine, ranks)
        own = len(ranks.shard(range(collector.config.rollout.prompts_per_step)))
        self.version, self.newest = version, 0
        self.requests = Background(min((self.staleness + 1) * max(own, 1), MOST_THREADS), "mm_grpo requests")
        # all below is read and written under `changed`
        self.changed = Condition()
        self.done: list[Group] = []
        self.assembled: dict[int, list[Group]] = {}
        self.asked: list[Place] = []
        self.slots: dict[int, list[int]] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.running, self.held = 0, False
        self.failure: BaseException | None = None

    def begin(self, done: int, ahead: Ahead | None = None) -> None:
        self.newest = done
        super().begin(done, ahead)
        if ahead is not None:
            self.done = list(ahead.groups)
            for step in sorted(ahead.slots):
                self._assemble_later(Rollout(step), ahead.slots[step], ahead.counts[step])
            with self.ranks.fail_together("prompts"):
                prompts = self.collector.prompts_at([(step, slot, 0) for step, slot in ahead.asked])
            for place, prompt in zip(ahead.asked, prompts, strict=True):
                self._ask(prompt, place)
        for step in range(done + 1, min(done + 1 + self.staleness, self.collector.max_steps) + 1):
            if step not in self.jobs:
                self._admit(step)

    def take(self, step: int) -> Rollout:
        rollout = self._taken(step)
        with self.changed:
            for kept in (self.assembled, self.slots, self.counts):
                kept.pop(step, None)
        return rollout

    def drain(self, step: int) -> None:
        """Wait until no request is in flight, where the engine cannot take weights in mid-generation."""
        with self.ranks.fail_together("requests under way"), self.changed:
            self.newest = step
            if not self.engine.updates_in_flight:
                self.held = True
                self.changed.wait_for(lambda: not self.running or self.failure is not None)

    def settle(self) -> None:
        """Requests go on: there are no conversations here."""

    def landed(self, step: int) -> None:
        with self.changed:
            self.held = False
            self.changed.notify_all()
        if step + 1 + self.staleness <= self.collector.max_steps:
            self._admit(step + 1 + self.staleness)

    def finished(self) -> Ahead | None:
        ready = [
            s for s, job in self.jobs.items() if job.done() and not job.cancelled() and not job.exception()
        ]
        everywhere = set.intersection(*map(set, self.ranks.all_gather(ready, "the steps ahead")))
        with self.changed:
            unscored = [g for step, taken in self.assembled.items() if step not in everywhere for g in taken]
            left = [step for step in self.jobs if step not in everywhere]
            return Ahead(
                {step: self.jobs[step].result() for step in sorted(everywhere)},
                [*unscored, *self.done],
                list(self.asked),
                {step: self.slots[step] for step in left},
                {step: self.counts[step] for step in left},
            )

    def close(self) -> None:
        self.requests.close()
        super().close()

    # requests --------------------------------------------------------------------------------

    def _admit(self, step: int) -> None:
        """Ask for the groups of a step, and put a step of as many together when there are so many."""
        rollout = Rollout(step)
        with timed(rollout.times, "time/data"), self.ranks.fail_together("prompts"):
            made = self.collector.make_prompts(rollout)
        self._assemble_later(rollout, made.slots, counts_of(made))
        for slot, prompt in zip(made.slots, made.prompts, strict=True):
            self._ask(prompt, (step, slot))

    def _assemble_later(self, rollout: Rollout, slots: Sequence[int], counts: dict[str, int]) -> None:
        with self.changed:
            self.slots[rollout.step], self.counts[rollout.step] = sorted(slots), counts
        self.jobs[rollout.step] = self.thread.submit(partial(self._assemble, rollout, sorted(slots), counts))

    def _ask(self, prompt: Prompt, place: Place, attempt: int = 0) -> Future[Group]:
        """Ask for a group. One of a first attempt goes to `done` when it is there."""
        future = self.requests.submit(partial(self._sample, prompt, place, attempt))
        if attempt == 0:
            with self.changed:
                self.asked.append(place)
            future.add_done_callback(partial(self._ended, place))
        return future

    def _ended(self, place: Place, future: Future[Group]) -> None:
        with self.changed:
            if future.cancelled():  # the run has ended
                return
            if (error := future.exception()) is not None:
                self.failure = self.failure or error
            else:
                self.asked.remove(place)
                self.done.append(future.result())
            self.changed.notify_all()

    def _sample(self, prompt: Prompt, place: Place, attempt: int) -> Group:
        """One group, in a thread of its own."""
        step, slot = place
        seeds = self.collector.seeds.group(step, slot, attempt)
        requests = requests_for([prompt], [seeds], self.collector.sampling)
        with self.changed:
            while self.held:
                self.requests.require_open()
                self.changed.wait(LOOK)
            self.running += 1
            oldest = self.version()
        try:
            completions = self.collector.engine.generate(requests)
        finally:
            with self.changed:
                self.running -= 1
                newest = self.newest  # an update that is being sent may have landed
                self.changed.notify_all()
        require_answers(requests, completions, (oldest, newest))
        [group] = groups_of([slot], [prompt], completions, attempt)
        return replace(group, place=place)

    # steps -----------------------------------------------------------------------------------

    def _assemble(self, rollout: Rollout, slots: Sequence[int], counts: dict[str, int]) -> Rollout:
        """The rollout of a step from the groups that finish first, scored. Collective, in the pipeline's thread."""
        collect = self.collector
        with timed(rollout.times, "time/rollout"), collect.ranks.fail_together("rollout"):
            groups, stale = self._first(rollout.step, slots)
        collect.count_prompts(rollout, counts)
        rollout.stale = int(collect.ranks.sum({"stale": stale}, "groups that are too old")["stale"])
        while True:
            rollout.own |= {group.slot: group for group in groups}
            collect.rewards(rollout, groups)
            if not rollout.zero_std_slots or rollout.attempts == collect.config.rollout.max_attempts:
                return collect.advantages(rollout)
            made = collect.prompts(rollout)
            # a replacement has the place of the group that it replaces
            places = [rollout.own[slot].place or (rollout.step, slot) for slot in made.slots]
            with timed(rollout.times, "time/rollout"), collect.ranks.fail_together("rollout"):
                asked = [
                    self._ask(prompt, place, rollout.attempts)
                    for prompt, place in zip(made.prompts, places, strict=True)
                ]
                groups = [
                    replace(one.result(), slot=slot) for slot, one in zip(made.slots, asked, strict=True)
                ]

    def _first(self, step: int, slots: Sequence[int]) -> tuple[list[Group], int]:
        """The groups that finished first, in the slots of `step`, and how many were too old and dropped."""
        stale = 0
        with self.changed:
            while True:
                if self.failure is not None:
                    raise self.failure
                self.requests.require_open()
                fresh = [g for g in self.done if step - 1 - oldest_version(g) <= self.staleness]
                for group in [g for g in self.done if step - 1 - oldest_version(g) > self.staleness]:
                    assert group.place is not None
                    self._ask(group.prompt, group.place)
                    stale += 1
                self.done = fresh
                if len(fresh) >= len(slots):
                    taken, self.done = fresh[: len(slots)], fresh[len(slots) :]
                    self.assembled[step] = taken
                    break
                self.changed.wait(LOOK)
        taken = sorted(taken, key=lambda group: group.place or (0, 0))
        return [replace(group, slot=slot) for slot, group in zip(slots, taken, strict=True)], stale


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
    return collect.advantages(rollout)


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
