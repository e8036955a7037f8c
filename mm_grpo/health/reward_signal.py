"""Rewards without a signal: groups whose rewards do not differ, and rewards that apply to nothing.

GRPO learns from differences within a group. Where all completions of a prompt have the same reward, or none has
one, all advantages are 0 and the group adds no gradient. A share of such groups is normal: easy prompts that are
always right and hard ones that never are. All groups, step after step, are a failure: a reward that is constant,
that never finds its answer (a column that is null, a form that completions do not have), or prompts far too hard.

Both guards count completions or prompts besides steps, for a step may be 8 completions or 8192, and a reward
that one completion in a hundred earns is no failure in a small run. A task that has been solved has no spread
either; it is known by rewards near the highest of the run, and passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_grpo.health import Alarm, RewardRange, Streak

WARN_STEPS, WARN_COMPLETIONS = 10, 500
"""Consecutive steps without spread, and completions sampled in them, after which `zero_std` warns. Where one
completion in a hundred earns a reward, 500 show no difference with a chance of 0.7 %."""
STOP_STEPS, STOP_COMPLETIONS = 20, 1000
"""Steps and completions of a run in which no group ever had spread, after which `zero_std` stops it: at one in a
hundred a chance of 0.004 %."""
EMPTY_STEPS, EMPTY_PROMPTS = 10, 100
"""Consecutive steps without any reward after which `no_reward` warns. It stops the run where none was there from
the start, in so many prompts or in all rows."""
SINGLE_STEPS, SINGLE_PROMPTS = 20, 500
"""Steps, and prompts unless every row came by, after which a single reward that never applied is reported: one
that is for a row in a hundred has by then applied but for a chance of 0.7 %."""


class ZeroStd:
    """The guard `zero_std`: groups whose rewards do not distinguish their completions.

    `completions` is P·G. Reads `advantages/frac_zero`, the share of groups without spread, and the totals' range.
    """

    name = "zero_std"

    def __init__(self, completions: int) -> None:
        self.completions = completions
        self.steps = 0
        self.ever = False
        self.reward: float | None = None
        self._range, self._streak = RewardRange(), Streak()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        solved = self._range.solved(metrics)
        share = metrics.get("advantages/frac_zero")
        if share is None or metrics.get("frac_reward_none") == 1:  # no rewards at all: `no_reward` says so
            return None
        self.steps += 1
        self.ever |= share < 1
        self.reward = metrics.get("reward")
        length = self._streak.count(share == 1 and not solved)
        if not self.ever and self.steps >= STOP_STEPS and self.steps * self.completions >= STOP_COMPLETIONS:
            return Alarm(self._never(), "stop")
        if length >= WARN_STEPS and length * self.completions >= WARN_COMPLETIONS:
            return Alarm(self._never() if not self.ever else self._no_more(length))
        return None

    def finish(self) -> Alarm | None:
        """At the end of a run that made updates: an alarm when none of them came from a difference of rewards.

        A few steps show nothing: those of a smoke run are noise, which is hardly ever right.
        """
        return Alarm(self._never(), "stop") if not self.ever and self.steps >= WARN_STEPS else None

    def _never(self) -> str:
        return (
            f"in none of {self.steps} steps did the rewards of any group differ{self._mean()}, so no completion was "
            "ever better than another and nothing is learned from rewards. Likely the reward is constant, never finds "
            "its answer in the completion (see completions and columns in rollouts/), or the prompts are all too hard "
            "or all too easy. `mm-grpo check CONFIG` calls each reward on right and on wrong answers; mind its "
            "arguments, data.columns and the prompt, raise rollout.num_generations, or mix in easier rows"
        )

    def _no_more(self, length: int) -> str:
        return (
            f"for {length} steps the rewards of no group have differed{self._mean()}, though they did before, so "
            "nothing is learned any more. Likely all completions of a prompt have become the same, right or wrong, or "
            "the rows that are left are too hard. Raise algorithm.entropy_coef or rollout.temperature, lower "
            "optim.learning_rate, or use other rows (rollout.max_attempts > 1 replaces such groups)"
        )

    def _mean(self) -> str:
        return "" if self.reward is None else f" (the mean reward is {self.reward:.4g})"


class NoReward:
    """The guard `no_reward`: rewards, or all of them together, that apply to no completion.

    `names` are the rewards that ought to apply somewhere: not those of weight 0, nor those that wait for a gate
    (`only_if`), which may stay shut for long. `prompts` is P.
    """

    name = "no_reward"

    def __init__(self, names: Sequence[str], prompts: int) -> None:
        self.names, self.prompts = tuple(names), prompts
        self.steps = 0
        self.ever = False
        self.failed = 0.0
        self._applied: set[str] = set()
        self._streak = Streak()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        if "frac_reward_none" not in metrics:  # a row of an older version
            return None
        self.steps += 1
        seen, every_row = self.steps * self.prompts, metrics.get("epoch", 0) >= 1
        none = metrics["frac_reward_none"] == 1
        self.ever |= not none
        self.failed = sum(
            float(metrics.get(f"rewards/{name}/{kind}", 0))
            for name in self.names
            for kind in ("errors", "timeouts")
        )
        self._applied |= {name for name in self.names if metrics.get(f"rewards/{name}/mean") is not None}
        length = self._streak.count(none)
        if length >= EMPTY_STEPS:
            dead = not self.ever and (every_row or seen >= EMPTY_PROMPTS)
            return Alarm(self._nothing(length), "stop" if dead else "warn")
        missing = [name for name in self.names if name not in self._applied]
        if missing and self.ever and self.steps >= SINGLE_STEPS and (every_row or seen >= SINGLE_PROMPTS):
            return Alarm(self._missing(missing))
        return None

    def finish(self) -> Alarm | None:
        """At the end of a run that made updates: an alarm when no completion of it had a reward."""
        if self.ever or not self.steps:
            return None
        return Alarm(self._nothing(self._streak.length), "stop" if self.steps >= EMPTY_STEPS else "warn")

    def _nothing(self, length: int) -> str:
        cause = (
            f"{self.failed:.0f} calls of the last step failed and were masked (on_error, on_timeout): see the warnings "
            "above"
            if self.failed
            else "Likely the columns that the rewards read are null or have another name: `mm-grpo check CONFIG` "
            "shows to how many rows each reward applies; data.columns gives columns their names"
        )
        return f"for {length} steps no completion has had a reward, so nothing is learned. {cause}"

    def _missing(self, names: Sequence[str]) -> str:
        listed = ", ".join(names)
        return (
            f"in {self.steps} steps {listed} applied to no completion; the run goes on by the other rewards alone. "
            "Likely a column that it needs is null in every row or has another name (data.columns): `mm-grpo check "
            "CONFIG` shows to how many rows it applies. Take it out of rewards, or give it weight 0 to only watch it"
        )
