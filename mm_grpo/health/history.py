"""What a run has shown up to its newest step, from the metrics of its steps alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOLVED = 0.9
"""Where the mean reward lies, between the lowest and the highest total of the run, from which a task counts as
solved: equal rewards and a sure policy are then what training was for, and no failure."""
FIRST_STEPS = 5
"""Steps at the start of a run whose mean entropy the later ones are compared with."""


class History:
    """The steps of a run so far.

    `now` are the metrics of the newest, `measured` the names that any step had a value of, `low` and `high` the lowest
    and the highest total reward of any completion.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.now: Mapping[str, Any] = {}
        self.measured: set[str] = set()
        self.low: float | None = None
        self.high: float | None = None
        self.rewarded = False
        """Whether any completion had a reward."""
        self.rated_steps = 0
        """Steps in which some had one."""
        self.spread = False
        """Whether the rewards of any group ever differed."""
        self.reward: float | None = None
        """The newest mean reward."""
        self.moved = self.moved_before = False
        """Whether an update moved the weights, and whether one did before the newest step."""
        self.updates = self.overflows = 0
        self.learning_rate = 0.0
        self.first_entropy: float | None = None
        """Mean of the first measurements, in nats per token; None up to the last of them."""
        self._entropies: list[float] = []

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of one more step."""
        self.now = metrics
        self.steps += 1
        self.measured |= {name for name, value in metrics.items() if value is not None}
        self._add_rewards(metrics)
        self.moved_before = self.moved
        self.moved |= metrics.get("learner/update_norm", 0) > 0
        self.updates += metrics.get("learner/updates", 0)
        self.overflows += metrics.get("learner/overflows", 0)
        self.learning_rate = max(self.learning_rate, metrics.get("learning_rate", 0))
        if len(self._entropies) == FIRST_STEPS:
            self.first_entropy = sum(self._entropies) / FIRST_STEPS
        elif metrics.get("completions/mean_logprob") is not None:
            self._entropies.append(-float(metrics["completions/mean_logprob"]))

    def _add_rewards(self, metrics: Mapping[str, Any]) -> None:
        if metrics.get("reward_min") is not None and metrics.get("reward_max") is not None:
            low, high = float(metrics["reward_min"]), float(metrics["reward_max"])
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)
        if metrics.get("frac_reward_none") != 1:
            self.rewarded = True
            self.rated_steps += 1
            self.spread |= metrics.get("advantages/frac_zero", 1) < 1
            self.reward = metrics.get("reward")

    @property
    def solved(self) -> bool:
        """Whether the newest mean reward is near the highest total of the run.

        Never before two different totals were seen: the mean of equal rewards says nothing about what is best.
        """
        known = self.now.get("reward_min") is not None and self.now.get("reward_max") is not None
        if not known or self.low is None or self.high is None or self.low == self.high:
            return False
        return float(self.now["reward"]) >= self.low + SOLVED * (self.high - self.low)
