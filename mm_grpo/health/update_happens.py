"""Updates happen: a step that ought to move the weights and does not is stopped, with its cause.

Healthy zeros pass: warm-up at rate 0, a batch whose live tokens are all clipped or masked, groups without spread. A
whole run of them ends with the guard `no_update` (rows.py).
"""

from __future__ import annotations

import math

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
            "and exactly the last has to be (set_gradient_accumulation_boundary)"
        )
    if record.live_tokens > 0 and record.grad_norm == 0.0:
        return (
            f"the gradient is exactly 0 although {record.live_tokens} tokens are unmasked and unclipped and have a "
            "non-zero advantage: the graph is detached, all parameters on its way are frozen, or every token has "
            "probability 1 (`entropy` is 0): lower optim.learning_rate"
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
