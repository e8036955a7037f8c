"""Groups that are sampled ahead without a schedule (`rollout.staleness_order: eager`).

The requests of a step go out as soon as the weights of the step k + 1 before it have been sent, so at most k + 1 steps'
worth is on its way or waits to be learned (AReaL's bound), and nobody waits for anybody else: a step learns from the
groups that finished first, whole, whichever step asked for them, and as many as it has prompts. They take its slots,
and `Group.place` says whose row and seeds each has. A group with a token that is more than k updates old when its step
comes is dropped and counted, and its place is asked for again, with the same row and seeds, so no row is lost.

An update is sent as soon as the learner has made it. Where the engine says that it can (`updates_in_flight`) it lands
in mid-generation, and completions have a span for each version; else it waits until no request is under way, and no
new one begins.

Which groups a step learns from depends on time, so a run does not repeat. Rows that take long are learned from later
than others, and may be dropped more often: `staleness/dropped` counts them.

Threads: each group is one call of the engine's `generate` in a thread of its own, without collectives. One thread puts
the steps together, in order; rewards are called there, and all collectives of the pipeline are made there, over its own
group. Prompts of first attempts are made in the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING

from mm_grpo.rollout.background import Background
from mm_grpo.rollout.collect import Collector, Rollout, counts_of, groups_of
from mm_grpo.rollout.engine import requests_for, require_answers
from mm_grpo.rollout.pipeline import Ahead, Lockstep, Place, oldest_version, with_advantages
from mm_grpo.timing import timed

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rollout.engine import RolloutEngine
    from mm_grpo.types import Group, Prompt

MOST_THREADS = 128
"""Groups that one process asks for at once."""
LOOK = 1.0
"""Seconds after which a thread that waits looks whether the run has ended."""


class Eager(Lockstep):
    """Learns from the groups that finish first. `version` gives the number of the weights that the engine holds."""

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
        self.replacements: list[Group] = []
        self.assembled: dict[int, list[Group]] = {}
        self.asked: list[Place] = []
        self.slots: dict[int, list[int]] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.running, self.held, self.closed = 0, False, False
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
            if self.engine.updates_in_flight:
                return
            self.held = True
            while self.running and self.failure is None:
                self.changed.wait(LOOK)

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
        with self.changed:
            self.closed = True
            self.changed.notify_all()
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

    def _ask(self, prompt: Prompt, place: Place, attempt: int = 0) -> Future[None]:
        if attempt == 0:
            with self.changed:
                self.asked.append(place)
        return self.requests.submit(partial(self._sample, prompt, place, attempt))

    def _sample(self, prompt: Prompt, place: Place, attempt: int) -> None:
        """One group, in a thread of its own."""
        step, slot = place
        try:
            seeds = self.collector.seeds.group(step, slot, attempt)
            requests = requests_for([prompt], [seeds], self.collector.sampling)
            with self.changed:
                while self.held and not self.closed:
                    self.changed.wait(LOOK)
                if self.closed:
                    return
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
            group = replace(group, place=place)
            with self.changed:
                if attempt == 0:
                    self.asked.remove(place)
                    self.done.append(group)
                else:
                    self.replacements.append(group)
                self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                self.failure = self.failure or error
                self.changed.notify_all()

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
                return with_advantages(collect, rollout)
            made = collect.prompts(rollout)
            slot_of: dict[Place | None, int] = {}  # a replacement has the place of the group that it replaces
            for slot, prompt in zip(made.slots, made.prompts, strict=True):
                place = rollout.own[slot].place or (rollout.step, slot)
                slot_of[place] = slot
                self._ask(prompt, place, rollout.attempts)
            with timed(rollout.times, "time/rollout"), collect.ranks.fail_together("rollout"):
                groups = self._replacing(slot_of)

    def _first(self, step: int, slots: Sequence[int]) -> tuple[list[Group], int]:
        """The groups that finished first, in the slots of `step`, and how many were too old and dropped."""
        stale = 0
        with self.changed:
            while True:
                self._require_going_on()
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

    def _replacing(self, slot_of: Mapping[Place | None, int]) -> list[Group]:
        """The groups that were asked for as replacements, in the slots that their places have in the step."""
        with self.changed:
            while len(self.replacements) < len(slot_of):
                self._require_going_on()
                self.changed.wait(LOOK)
            taken, self.replacements = self.replacements, []
        placed = [replace(group, slot=slot_of[group.place]) for group in taken]
        return sorted(placed, key=lambda group: group.slot)

    def _require_going_on(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise RuntimeError("the run has ended")
