"""All guards of a run together: what each step shows them, and what is done when one fires.

The trainer calls `apply` with the message of a guard of one moment; the others are callbacks of the run, which look at
the completions and the metrics of each step, and at the end. Guards with a history live on the first process, which has
the complete metrics. Their state is rebuilt from the rows of metrics.jsonl (`replay`) and not from a checkpoint, so a
resumed run warns and stops at the steps at which the whole run would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.health import Alarm, apply_guard
from mm_grpo.health.checks import duplicate_completions
from mm_grpo.health.history import MetricsHistory
from mm_grpo.health.rows import Guard, at_the_end, guard_rows
from mm_grpo.health.sight import SightLost
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.types import Group

WARN_EVERY = 50
"""Steps from one warning of a guard to its next."""


class Guards:
    """Guards of one run; `config.run.guards` says what they do when they fire.

    Calls `log(step, guard, action, message)` for each that fires, before the run is stopped.
    """

    def __init__(
        self,
        config: GRPOConfig,
        rewards: Sequence[RewardSpec],
        log: Callable[[int, str, str, str], None] | None = None,
    ) -> None:
        self._log = log
        self._actions: Mapping[Any, str] = config.run.guards
        self._warned: dict[str, int] = {}
        self._run = MetricsHistory(config, rewards)
        completions = config.rollout.prompts_per_step * config.rollout.num_generations
        self._guards: list[Guard | SightLost] = [*guard_rows(config), SightLost(completions)]

    def apply(self, name: str, message: str | None, step: int, default: str = "stop") -> None:
        """Stop the run, warn or do nothing about a guard's message, if there is one. Raises GuardStop on `stop`."""
        if message is None:
            return
        action = self._actions.get(name, default)
        if action != "warn" or self._count_warning(name, step):
            if self._log is not None and action != "off":
                self._log(step, name, action, message)
            apply_guard(name, message, self._actions, default)

    def on_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Look for seeds that repeat. Raises GuardStop as `run.guards.duplicate_completions` says."""
        self.apply("duplicate_completions", duplicate_completions(groups), step)

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step to all guards that need several. Raises GuardStop if one of them stops the run."""
        for name, alarm in self._alarms(metrics) if step > 0 else ():
            self.apply(name, alarm.message, step, alarm.action)

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rebuild the guards' state after the steps of an earlier process. Nothing is logged or stopped again."""
        for row in (row for row in rows if row["step"] > 0):  # step 0 is the evaluation before the first
            for name, alarm in self._alarms(row):
                if self._actions.get(name, alarm.action) == "warn":
                    self._count_warning(name, row["step"])

    def on_train_end(self, step: int) -> None:
        """Check the whole run, after everything was saved. Raises GuardStop if it was no success, or warns of it."""
        if (result := at_the_end(self._run)) is not None:
            name, alarm = result
            self._warned.pop(name, None)  # reported at the end however recent the last warning is
            self.apply(name, alarm.message, step, alarm.action)

    def _alarms(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Alarm]]:
        """Add a step; yield the name and alarm of each guard that fires, at most one a name."""
        self._run.add(metrics)
        fired = set[str]()
        for guard in self._guards:
            if guard.name not in fired and (alarm := guard.observe(self._run)) is not None:
                fired.add(guard.name)
                yield guard.name, alarm

    def _count_warning(self, name: str, step: int) -> bool:
        """Return True if a warning is due, and count it."""
        last = self._warned.get(name)
        due = last is None or step - last >= WARN_EVERY
        if due:
            self._warned[name] = step
        return due
