"""Terms of the loss that have become nothing: a KL of exactly 0, and tokens that a correction drops.

`ZeroKL`. With algorithm.beta > 0 the policy is held near a reference policy. Once an update has moved the weights
the two differ, and the KL, a mean over many tokens, is tiny but not 0. A KL of exactly 0 for many steps says that
policy and reference are the same weights: a reference that was not copied, adapters that were not switched off
for it, or updates below the resolution of the weights' number format. The first steps may honestly show 0, in
bfloat16 several, so the guard waits; a reference that is set to the policy again and again is not watched.

`MaskedShare`. Where the engine's probabilities differ from the learner's, tokens or completions outside the bounds
get weight 0 (algorithm.importance_sampling_mode), and completions that have become improbable are dropped
(algorithm.off_policy_mask_threshold). Healthy runs drop a few in a hundred, in sequence modes at most some tens.
Nearly all is a failure of the sync, of the engine, or of the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_grpo.config import AlgorithmConfig
from mm_grpo.health import Alarm, Streak

KL_STEPS = 10
"""Consecutive steps with a KL of exactly 0, all after an update that moved the weights, after which it warns."""
MASKED = 0.9
"""Share of tokens dropped that is called nearly all."""
MASKED_STEPS, STOP_STEPS = 10, 20
"""Consecutive steps at that share after which `masked_share` warns; with every token dropped it stops after 20."""


class ZeroKL:
    """The guard `zero_kl`. Reads `kl`, in nats, which is measured before a step's first update."""

    name = "zero_kl"

    def __init__(self) -> None:
        self._moved = False
        self._streak = Streak()

    @staticmethod
    def watches(config: AlgorithmConfig) -> bool:
        """Whether the KL of a run ought to leave 0: it has a KL term, and a reference that stays behind.

        With kl_in_reward the KL is between engine and learner, whose rounding alone is above 0.
        """
        equal_again = config.sync_ref_model and config.ref_model_mixup_alpha == 1
        return config.beta > 0 and not config.kl_in_reward and not equal_again

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        kl = metrics.get("kl")
        length = self._streak.length
        if kl is not None:
            length = self._streak.count(self._moved and kl == 0)
        self._moved |= metrics.get("learner/update_norm", 0) > 0
        if kl is None or length < KL_STEPS:
            return None
        return Alarm(
            f"for {length} steps the KL to the reference policy has been exactly 0, though updates moved the weights: "
            "the reference is the policy itself, or the updates are too small to change any log-prob in the weights' "
            "number format. Raise optim.learning_rate or train in float32 (model.dtype); with a model of your own, "
            "check that it shares no weights with the reference (a copy by copy.deepcopy, or adapters that "
            "disable_adapter switches off); without need of a reference set algorithm.beta=0"
        )


class MaskedShare:
    """The guard `masked_share`. Reads the shares of tokens that the correction and the off-policy mask dropped."""

    name = "masked_share"

    def __init__(self) -> None:
        self._corrected, self._all, self._off_policy = Streak(), Streak(), Streak()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        masked = metrics.get("sampling/masked_ratio")
        off_policy = metrics.get("sampling/off_policy_ratio")
        every = self._all.length
        if masked is not None:
            every = self._all.count(masked == 1)
            if self._corrected.count(masked >= MASKED) >= MASKED_STEPS:
                action = "algorithm.importance_sampling_mode"
                alarm = self._message(masked, "tokens", self._corrected.length, action)
                return Alarm(alarm, "stop" if every >= STOP_STEPS else "warn")
        if off_policy is not None and self._off_policy.count(off_policy >= MASKED) >= MASKED_STEPS:
            what = "tokens of completions with a negative advantage"
            field = "algorithm.off_policy_mask_threshold"
            return Alarm(self._message(off_policy, what, self._off_policy.length, field))
        return None

    def _message(self, share: float, what: str, steps: int, field: str) -> str:
        return (
            f"for {steps} steps {field} has dropped nearly all {what}, {share:.0%} in the last, so next to nothing is "
            "learned from them. Likely the engine's log-probs are not those of the learner (see "
            "sampling/sampling_logp_difference; `mm-grpo doctor CONFIG` compares the two), completions are learned "
            "from too often (algorithm.num_iterations, optim.updates_per_step), or the bounds are too narrow "
            "(algorithm.importance_sampling_clip_min, importance_sampling_clip_max, off_policy_mask_threshold)"
        )
