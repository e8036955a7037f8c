"""All guards of a run together: what a step shows them, what is done, and what a resumed run gives them back.

The trainer calls `apply` with the message of a guard of one moment; the others are callbacks of the run, which look at
the completions and the metrics of each step, and at the end. Guards with a history live on the first process, whose
metrics are complete; their state is rebuilt from the rows of metrics.jsonl (`replay`), so a resumed run warns and stops
where the whole run would have, and a checkpoint holds nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.health import Alarm, apply_guard
from mm_grpo.health.checks import duplicate_completions
from mm_grpo.health.history import History
from mm_grpo.health.rows import Guard, at_the_end, rows_of
from mm_grpo.health.sight import SightLost
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.types import Group

WARN_EVERY = 50
"""Steps from one warning of a guard to its next."""


class Guards:
    """The guards of one run. `rewards` are its rewards; `config.run.guards` says what guards do when they fire.

    `log(step, guard, action, message)` is called for each that fires, before a run is stopped.
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
        self._run = History()
        completions = config.rollout.prompts_per_step * config.rollout.num_generations
        self._watching: list[Guard | SightLost] = [*rows_of(config, rewards), SightLost(completions)]

    def apply(self, name: str, message: str | None, step: int, default: str = "stop") -> None:
        """Do what is to be done about a guard's message, if there is one. Raises GuardStop on `stop`."""
        if message is None:
            return
        action = self._actions.get(name, default)
        if action != "warn" or self._warns(name, step):
            if self._log is not None and action != "off":
                self._log(step, name, action, message)
            apply_guard(name, message, self._actions, default)

    def on_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Look for seeds that repeat. Raises GuardStop as `run.guards.duplicate_completions` says."""
        self.apply("duplicate_completions", duplicate_completions(groups), step)

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step to all guards that need several. Raises GuardStop when one of them stops the run."""
        for name, alarm in self._alarms(metrics) if step > 0 else ():
            self.apply(name, alarm.message, step, alarm.action)

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rebuild what the guards knew after the steps of an earlier process. Nothing is logged or stopped again.

        The row of step 0, the evaluation before the first, is passed over.
        """
        for row in (row for row in rows if row["step"] > 0):
            for name, alarm in self._alarms(row):
                if self._actions.get(name, alarm.action) == "warn":
                    self._warns(name, row["step"])

    def on_train_end(self, step: int) -> None:
        """The end of a run, after everything was saved. Raises GuardStop where it was no success, or warns of it."""
        if (found := at_the_end(self._run)) is not None:
            name, alarm = found
            self._warned.pop(name, None)  # reported at the end however recent the last warning is
            self.apply(name, alarm.message, step, alarm.action)

    def _alarms(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Alarm]]:
        """Take in a step; what each guard found, at most once."""
        self._run.add(metrics)
        fired = set[str]()
        for guard in self._watching:
            if guard.name not in fired and (alarm := guard.observe(self._run)) is not None:
                fired.add(guard.name)
                yield guard.name, alarm

    def _warns(self, name: str, step: int) -> bool:
        """Whether a warning is due; if so it counts as given."""
        last = self._warned.get(name)
        due = last is None or step - last >= WARN_EVERY
        if due:
            self._warned[name] = step
        return due
