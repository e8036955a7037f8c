"""Completions that have collapsed: a policy that is sure of everything, and completions that never end.

`EntropyCollapse`. Reinforcement learning makes a policy surer; when it is sure of wrong answers too, it no longer
tries others, and nothing is left to learn from. The entropy is estimated from the samples themselves, as the
mean of -log p over all sampled tokens (`completions/mean_logprob`), for the learner's own `entropy` covers only the
groups that it ran. Its level depends on the task (0.1 to 1 nats per token at the start of most), so a collapse is
a small part of the run's own beginning, and next to 0. A policy that is sure because it is right (rewards near the
highest of the run) passes: a task of one-word answers ends so.

`ClippedLengths`. Completions that run into rollout.max_completion_length have no end, mostly no answer, and are
rewarded for what they had by then. Some are normal while a model learns to be brief; nearly all, step after step,
are a limit that is too low, or a stop token that is never sampled or not recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_grpo.health import Alarm, RewardRange, Streak

FIRST_STEPS = 5
"""Steps at the start of a run whose mean entropy the later ones are compared with."""
COLLAPSED, NEAR_ZERO = 0.05, 0.02
"""Part of that mean, and nats per token, below both of which the entropy has collapsed: 50 tokens of 0.02 nats
hold 1 nat, so a second sample is the same as the first with a chance of about 1 in 3."""
COLLAPSED_STEPS = 10
"""Consecutive steps below both after which `entropy_collapse` warns."""
CLIPPED = 0.95
"""Share of completions cut at the limit that is called nearly all."""
CLIPPED_STEPS, STOP_STEPS = 10, 20
"""Consecutive steps at that share after which `clipped_lengths` warns. Where cut completions are left out of the
loss and all are cut, nothing can be learned, and it stops the run after 20."""


class EntropyCollapse:
    """The guard `entropy_collapse`. Reads `completions/mean_logprob`, in nats per token, and the totals' range."""

    name = "entropy_collapse"

    def __init__(self) -> None:
        self._first: list[float] = []
        self._range, self._streak = RewardRange(), Streak()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        solved = self._range.solved(metrics)
        if metrics.get("completions/mean_logprob") is None:
            return None
        entropy = -float(metrics["completions/mean_logprob"])
        if len(self._first) < FIRST_STEPS:
            self._first.append(entropy)
            return None
        before = sum(self._first) / FIRST_STEPS
        collapsed = entropy < COLLAPSED * before and entropy < NEAR_ZERO
        length, reward = self._streak.count(collapsed and not solved), metrics.get("reward")
        if length < COLLAPSED_STEPS or reward is None:
            return None
        return Alarm(
            f"the entropy of the policy has collapsed: {entropy:.2g} nats per token, where the run began at "
            f"{before:.2g}, for {length} steps, and the mean reward ({reward:.4g}) is not near the highest: the policy "
            "is sure of wrong answers too and tries no others. Lower optim.learning_rate, raise "
            "algorithm.entropy_coef, algorithm.epsilon_high or rollout.temperature, or go back to the checkpoint of "
            "the best evaluation"
        )


class ClippedLengths:
    """The guard `clipped_lengths`. Reads `completions/clipped_ratio`.

    `limit` is rollout.max_completion_length; `left_out` says that cut completions do not enter the loss.
    """

    name = "clipped_lengths"

    def __init__(self, limit: int, left_out: bool) -> None:
        self.limit, self.left_out = limit, left_out
        self._clipped, self._all = Streak(), Streak()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        share = metrics.get("completions/clipped_ratio")
        if share is None:
            return None
        length, every = self._clipped.count(share >= CLIPPED), self._all.count(share == 1)
        if length < CLIPPED_STEPS:
            return None
        nothing = self.left_out and every >= STOP_STEPS
        effect = (
            "algorithm.mask_truncated_completions leaves them out of the loss, so next to nothing is learned"
            if self.left_out
            else "they have no end, and often no answer, when they are rewarded"
        )
        return Alarm(
            f"for {length} steps nearly all completions ({share:.0%} in the last) have been cut at "
            f"rollout.max_completion_length = {self.limit} tokens: {effect}. Raise the limit, ask for a shorter answer "
            "in the prompt, or reward brevity (length); if completions in rollouts/ go on after their answer, the "
            "model's end token is not the one that its generation config names",
            "stop" if nothing else "warn",
        )
