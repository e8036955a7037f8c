"""When the groups of a step are made: in the step itself, or ahead of it while the learner works (max_staleness k > 0).

`Synchronous` makes them when they are asked for. `Lockstep` samples step s under weight version max(0, s - 1 - k) and
no other: one job per step, one after the other in a thread; an update lands when no job runs. Samples follow from the
schedule, not from the time that anything takes, so a run repeats, on any number of servers and after a resume.

    version 0            1            2                       k = 1
    engine  [1][2]       [3]          [4]                     job of a step: prompts, completions, rewards, advantages
    learner       learn 1      learn 2      learn 3           update 1 lands between the jobs of 2 and of 3

The schedule comes from verl's one-step-off-policy recipe and prime-rl; here k is any number. The threads:

- main thread: the learner, weight sync, evaluation, guards, callbacks, checkpoints. Updates and evaluations come when
  no job runs.
- job thread: prompts (prefetch.py decodes images in more threads), sampling, rewards in the trainer's process, and the
  collectives of these, over a gloo group that only this thread uses (`Ranks.second`). Every process has the same jobs
  in the same order, so the collectives meet.

The engine holds its weights outside this process and may be called from both threads (`remote`, engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from mm_grpo.background import BackgroundThreads
from mm_grpo.rollout.collect import Collector, Rollout

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rollout.engine import RolloutEngine


class Synchronous:
    """Makes the groups of a step when they are asked for; the engine sleeps while the learner works."""

    def __init__(self, collector: Collector, engine: RolloutEngine) -> None:
        self.collector, self.engine = collector, engine

    def begin(self, done: int, ahead: Mapping[int, Rollout]) -> None:
        """Continue after step `done`, with the steps ahead that a checkpoint kept."""

    def take(self, step: int) -> Rollout:
        """Return the groups of a step, with rewards and advantages. Collective."""
        return collect_step(self.collector, Rollout(step))

    def sleep(self) -> None:
        """Free the device for the learner."""
        self.engine.sleep()

    def drain(self) -> None:
        """Wait until no job runs. Collective."""

    def landed(self, step: int) -> None:
        """Note that the engine has the weights of `step`."""

    def finished(self) -> dict[int, Rollout]:
        """Return the steps ahead that a checkpoint has to keep."""
        return {}

    def close(self) -> None:
        """Begin no further job."""


class Lockstep(Synchronous):
    """Samples steps ahead under the version that the schedule says. `ranks` belong to the main thread."""

    def __init__(self, collector: Collector, engine: RolloutEngine, ranks: Ranks) -> None:
        super().__init__(collector, engine)
        self.ranks, self.staleness = ranks, collector.config.rollout.max_staleness
        self.jobs: dict[int, Future[Rollout]] = {}
        self.thread = BackgroundThreads(1, "mm_grpo steps ahead")
        self.current: Rollout | None = None
        self.learned = 0

    def begin(self, done: int, ahead: Mapping[int, Rollout]) -> None:
        self.learned = done
        for step, rollout in sorted(ahead.items()):
            self.jobs[step] = self.thread.submit(partial(self.collector.advantages, rollout))

    def take(self, step: int) -> Rollout:
        self._start(step)
        seconds = self._wait([self.jobs[step]])
        self.current = rollout = self.jobs.pop(step).result()
        rollout.times["time/wait"] = seconds
        return rollout

    def sleep(self) -> None:
        """Do nothing: the engine samples on."""

    def drain(self) -> None:
        # a job is to be sampled under the weights that the engine has now; checks would wait behind it
        seconds = self._wait([job for _, job in sorted(self.jobs.items())])
        if self.current is not None:
            self.current.times["time/wait"] += seconds

    def landed(self, step: int) -> None:
        self.learned = step
        interval = self.collector.config.run.eval_every
        # an evaluation comes before the next job: both would ask the engine
        if not interval or step % interval:
            self._start(step + 1)

    def finished(self) -> dict[int, Rollout]:
        # steps that began under the newest weights are sampled again after a resume, from the same seeds
        steps = sorted(step for step in self.jobs if step <= self.learned + self.staleness)
        return {step: self.jobs[step].result() for step in steps}

    def close(self) -> None:
        self.thread.close()

    def _start(self, step: int) -> None:
        """Begin the steps whose weight version the engine has when `step` is the next to be learned."""
        last = min(step + self.staleness, self.collector.max_steps)
        for ahead in range(step, last + 1):
            if ahead not in self.jobs:
                self.jobs[ahead] = self.thread.submit(
                    partial(collect_step, self.collector, Rollout(ahead), self.thread.require_open)
                )

    def _wait(self, jobs: Sequence[Future[Rollout]]) -> float:
        """Wait for jobs, and raise on every process what one of them raised; returns the seconds."""
        started = time.perf_counter()
        with self.ranks.fail_together("the steps ahead"):
            for job in jobs:
                job.result()
        return time.perf_counter() - started


def collect_step(
    collector: Collector, rollout: Rollout, require_open: Callable[[], None] = lambda: None
) -> Rollout:
    """Make prompts, completions, rewards and advantages of a step, attempt after attempt. Collective.

    `require_open` is called between them, and raises when the run has ended.
    """
    # above 1 only with dynamic sampling
    for _ in range(collector.config.rollout.max_attempts):
        prompts = collector.prompts(rollout)
        require_open()
        groups = collector.completions(rollout, prompts)
        require_open()
        collector.rewards(rollout, groups)
        require_open()
        if not rollout.zero_std_slots:
            break
    return collector.advantages(rollout)


def scheduled_version(step: int, staleness: int) -> int:
    """Return the weight version that a step is sampled under.

    >>> [scheduled_version(step, 2) for step in (1, 2, 3, 4, 5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - 1 - staleness)
