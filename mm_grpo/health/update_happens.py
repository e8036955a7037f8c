"""Updates happen: a step that ought to move the weights and does not is stopped, with its cause; and so is a run.

Healthy zeros of a step pass: warm-up at rate 0, a batch whose live tokens are all clipped or masked, groups
without spread. A whole run of them is no success: the model that it saved is the one that it began with. Such a
run ends with the guard `no_update`, after everything has been saved, and exit code 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mm_grpo.health import Alarm
from mm_grpo.types import UpdateRecord


def update_happens(record: UpdateRecord) -> str | None:
    """A message when the update did not happen though it should have, else None."""
    if record.trainable_parameters == 0:
        return (
            "the model has no trainable parameter, so no update can ever happen; "
            "unfreeze something (model.freeze_vision, requires_grad of a model that you passed in)"
        )
    if not math.isfinite(record.grad_norm):
        return (
            f"the gradient norm is {record.grad_norm} and the update was skipped (overflow); lower "
            "optim.learning_rate, check the rewards for huge values, or train in float32 (model.dtype)"
        )
    if not math.isfinite(record.update_norm):
        return (
            f"the update moved the weights by {record.update_norm} at learning rate {record.learning_rate:.3g}, "
            "further than float32 can tell; lower optim.learning_rate and start again, or resume an earlier checkpoint"
        )
    if record.boundaries != 1:
        return (
            f"{record.boundaries} backward passes of this update were marked as the one that closes its accumulation, "
            "and exactly the last has to be: with none the optimizer does not step, and with more only the packs after "
            "the last but one count. Mark it by hand (set_gradient_accumulation_boundary) before each backward"
        )
    if record.live_tokens > 0 and record.grad_norm == 0.0:
        return (
            f"the gradient is exactly 0 although {record.live_tokens} tokens are unmasked and unclipped and have a "
            "non-zero advantage; the loss does not reach the trainable parameters: the graph is detached, or all "
            "parameters on its way are frozen; or the model gives every token probability 1 (`entropy` is 0), as after "
            "updates that were too large: lower optim.learning_rate"
        )
    moving = record.learning_rate > 0 and record.grad_norm > 0 and record.stepped
    if moving and record.update_norm == 0.0:
        return (
            f"the weights did not change at learning rate {record.learning_rate:.3g} and gradient norm "
            f"{record.grad_norm:.3g}; the optimizer did not step, holds other tensors "
            "than the model's, or the update is below the resolution of the weights' dtype"
        )
    return None


def finite_loss(loss: float) -> str | None:
    """A message when a step's mean loss is infinite or NaN, else None."""
    if math.isfinite(loss):
        return None
    return (
        f"the loss is {loss}; lower optim.learning_rate, check the rewards for huge values and the engine's log-probs, "
        "or train in float32 (model.dtype)"
    )


class NoUpdate:
    """The guard `no_update`: whether any update of the run moved the weights, and if none did, why.

    Reads `learner/update_norm`, and for the cause what else could have kept the weights where they are. It speaks at
    the end of a run alone, for a slow start (warm-up, hard prompts) is no failure.
    """

    name = "no_update"

    def __init__(self) -> None:
        self.steps = 0
        self.moved = False
        self._updates = self._overflows = 0
        self._rate = 0.0
        self._always = {
            "frac_reward_none": True,
            "advantages/frac_zero": True,
            "completions/clipped_ratio": True,
        }

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        self.steps += 1
        self.moved |= metrics.get("learner/update_norm", 0) > 0
        self._updates += metrics.get("learner/updates", 0)
        self._overflows += metrics.get("learner/overflows", 0)
        self._rate = max(self._rate, metrics.get("learning_rate", 0))
        for name, held in self._always.items():
            self._always[name] = held and metrics.get(name) == 1
        return None

    def finish(self) -> Alarm | None:
        if self.moved or not self.steps:
            return None
        return Alarm(
            f"the run made no update in {self.steps} steps: {self._cause()}. The weights are those that it began with",
            "stop",
        )

    def _cause(self) -> str:
        if self._overflows and not self._updates:
            return "every gradient overflowed; lower optim.learning_rate or train in float32 (model.dtype)"
        if self._updates and self._rate == 0:
            return f"the learning rate was 0 in all {self._updates} updates; raise optim.learning_rate"
        if self._updates:
            return (
                f"the gradient was 0 in all {self._updates} updates, for every token was clipped or masked (clip_ratio "
                "and sampling/masked_ratio in metrics.jsonl); widen algorithm.epsilon or the bounds of the correction"
            )
        if self._always["frac_reward_none"]:
            return (
                "no completion had a reward; `mm-grpo check CONFIG` shows to how many rows each reward applies, and "
                "data.columns gives columns their names"
            )
        if self._always["advantages/frac_zero"]:
            return (
                "the rewards of no group differed, so there was nothing to learn from; `mm-grpo check CONFIG` calls "
                "each reward on right and on wrong answers, and rollouts/ holds what was answered"
            )
        if self._always["completions/clipped_ratio"]:
            return (
                "every completion was cut at rollout.max_completion_length, and algorithm.mask_truncated_completions "
                "leaves those out of the loss; raise the limit"
            )
        return "no completion that enters the loss had an advantage (advantages/frac_zero, completions/clipped_ratio)"
