"""All guards of a run together: what a step shows them, what is done, and what a resumed run gives them back.

The trainer calls `apply` with the message of a guard of one moment, `observe` with the metrics of each finished
step, and `finish` at the end. Guards with a history live on the first process, whose metrics are complete; their
state is rebuilt from the rows of metrics.jsonl (`replay`), so a resumed run warns and stops where the whole run
would have, and a checkpoint holds nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mm_grpo.config import GRPOConfig
from mm_grpo.health import Alarm, apply_guard
from mm_grpo.health.collapse import ClippedLengths, EntropyCollapse
from mm_grpo.health.loss_terms import MaskedShare, ZeroKL
from mm_grpo.health.reward_signal import NoReward, ZeroStd
from mm_grpo.health.sight import SightLost
from mm_grpo.health.tools import ToolsFailing, ToolsUnused
from mm_grpo.health.update_happens import NoUpdate
from mm_grpo.rewards.spec import RewardSpec

WARN_EVERY = 50
"""Steps from one warning of a guard to its next."""


class StepGuard(Protocol):
    """A guard that needs several steps."""

    name: str

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        """Take in the metrics of one more step, as metrics.jsonl holds them."""


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
        rollout, algorithm = config.rollout, config.algorithm
        self._actions: Mapping[Any, str] = config.run.guards
        self._warned: dict[str, int] = {}
        no_update = NoUpdate()
        completions = rollout.prompts_per_step * rollout.num_generations
        zero_std = ZeroStd(completions)
        ungated = [spec.name for spec in rewards if spec.weight != 0 and not spec.options.only_if]
        no_reward = NoReward(ungated, rollout.prompts_per_step)
        self._at_the_end = (no_update, no_reward, zero_std)
        self._watching: list[StepGuard] = [
            no_reward,
            zero_std,
            ClippedLengths(rollout.max_completion_length, algorithm.mask_truncated_completions),
            EntropyCollapse(),
            MaskedShare(),
            SightLost(completions),
            ToolsFailing(),
            ToolsUnused(),
            *([ZeroKL()] if ZeroKL.watches(algorithm) else []),
            no_update,
        ]

    def apply(self, name: str, message: str | None, step: int, default: str = "stop") -> None:
        """Do what is to be done about a guard's message, if there is one. Raises GuardStop on `stop`."""
        if message is None:
            return
        action = self._actions.get(name, default)
        if action != "warn" or self._warns(name, step):
            if self._log is not None and action != "off":
                self._log(step, name, action, message)
            apply_guard(name, message, self._actions, default)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step to all guards that need several. Raises GuardStop when one of them stops the run."""
        for guard in self._watching:
            self._act(guard.name, guard.observe(step, metrics), step)

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rebuild what the guards knew after the steps of an earlier process. Nothing is logged or stopped again.

        The row of step 0, the evaluation before the first, is passed over.
        """
        for row in (row for row in rows if row["step"] > 0):
            for guard in self._watching:
                alarm = guard.observe(row["step"], row)
                if alarm is not None and self._actions.get(guard.name, alarm.action) == "warn":
                    self._warns(guard.name, row["step"])

    def finish(self, step: int) -> None:
        """The end of a run, after everything was saved: one without an update, rewards or spread is no success.

        Raises GuardStop with the first of these that holds, or warns of it.
        """
        for guard in self._at_the_end:
            if (alarm := guard.finish()) is not None:
                self._warned.pop(guard.name, None)  # reported at the end however recent the last warning is
                return self._act(guard.name, alarm, step)

    def _act(self, name: str, alarm: Alarm | None, step: int) -> None:
        if alarm is not None:
            self.apply(name, alarm.message, step, alarm.action)

    def _warns(self, name: str, step: int) -> bool:
        """Whether a warning is due; if so it counts as given."""
        last = self._warned.get(name)
        due = last is None or step - last >= WARN_EVERY
        if due:
            self._warned[name] = step
        return due
