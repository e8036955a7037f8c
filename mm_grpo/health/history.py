"""The metrics of a run up to its newest step, as the guards read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.rewards.spec import RewardSpec

SOLVED_SHARE = 0.9
"""Position of the mean reward between the lowest and the highest total of the run from which a task counts as solved:
equal rewards and a sure policy are then what training was for, and no failure."""
FIRST_STEPS = 5
"""Steps at the start of a run whose mean entropy the later ones are compared with."""


class MetricsHistory:
    """The steps of a run so far."""

    def __init__(self, config: GRPOConfig, rewards: Sequence[RewardSpec]) -> None:
        self.prompts_per_step = config.rollout.prompts_per_step
        self.max_length = config.rollout.max_completion_length
        self.masks_truncated = config.algorithm.mask_truncated_completions
        # rewards of weight 0, and gated ones, whose gate may stay shut for long, may apply to nothing
        self.reward_names = [s.name for s in rewards if s.weight != 0 and not s.options.only_if]
        self.steps = 0
        self.now: Mapping[str, Any] = {}
        """Metrics of the newest step."""
        self.measured: set[str] = set()
        """Names of the metrics that had a value in any step."""
        self.low: float | None = None
        self.high: float | None = None
        """Lowest and highest total reward of any completion."""
        self.rewarded_steps = 0
        """Steps in which a completion had a reward."""
        self.has_difference = False
        """True if the rewards of any group ever differed."""
        self.reward: float | None = None
        """The newest mean reward."""
        self.weights_moved = self.weights_moved_before = False
        """True if an update moved the weights, and if one did before the newest step."""
        self.updates = self.overflows = 0
        self.learning_rate = 0.0
        self.first_entropy: float | None = None
        """Mean of the first measurements, in nats per token; None up to the last of them."""
        self._entropies: list[float] = []

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one more step."""
        self.now = metrics
        self.steps += 1
        self.measured |= {name for name, value in metrics.items() if value is not None}
        if metrics.get("reward_min") is not None and metrics.get("reward_max") is not None:
            low, high = float(metrics["reward_min"]), float(metrics["reward_max"])
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)
        if metrics.get("frac_reward_none") != 1:
            self.rewarded_steps += 1
            self.has_difference |= metrics.get("advantages/frac_zero", 1) < 1
            self.reward = metrics.get("reward")
        self.weights_moved_before = self.weights_moved
        self.weights_moved |= metrics.get("learner/update_norm", 0) > 0
        self.updates += metrics.get("learner/updates", 0)
        self.overflows += metrics.get("learner/overflows", 0)
        self.learning_rate = max(self.learning_rate, metrics.get("learning_rate", 0))
        if len(self._entropies) == FIRST_STEPS:
            self.first_entropy = sum(self._entropies) / FIRST_STEPS
        elif metrics.get("completions/mean_logprob") is not None:
            self._entropies.append(-float(metrics["completions/mean_logprob"]))

    @property
    def solved(self) -> bool:
        """True if the newest mean reward is near the highest total of the run.

        False before two different totals were seen: the mean of equal rewards says nothing about what is best.
        """
        if self.now.get("reward_min") is None or self.now.get("reward_max") is None:
            return False
        if self.low is None or self.high is None or self.low == self.high:
            return False
        return float(self.now["reward"]) >= self.low + SOLVED_SHARE * (self.high - self.low)

    @property
    def unapplied(self) -> str:
        """Names of rewards that applied to no completion yet."""
        return ", ".join(n for n in self.reward_names if f"rewards/{n}/mean" not in self.measured)

    def has_seen(self, prompts: int) -> bool:
        """Return True after so many prompts, or an epoch."""
        return self.now.get("epoch", 0) >= 1 or self.steps * self.prompts_per_step >= prompts
