"""Guards of one moment: functions that return a message, or None if nothing is wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mm_grpo.types import Completion, Group, Prompt, UpdateRecord

MIN_CHANCE = 1e-9
"""Chance below which repetition is called a fault: far under one false alarm in a million groups."""


def duplicate_completions(groups: Sequence[Group]) -> str | None:
    """Return a message if a group repeats a completion beyond what its probability allows, else None.

    Equal completions are healthy if the policy is sure of its answer, and a fault if two generations drew the same
    noise. The engine's own log-probabilities tell the two apart.
    """
    for group in groups:
        counts = Counter(c.token_ids for c in group.completions)
        for completion in group.completions:
            copies = counts[completion.token_ids]
            chance = copies_chance(completion, copies, len(group.completions))
            if copies > 1 and chance < MIN_CHANCE:
                return _copies_message(group, completion, copies, chance)
    return None


def unique_ratio(groups: Sequence[Group]) -> float:
    """Return distinct completions over completions, averaged over the groups."""
    ratios = [len({c.token_ids for c in g.completions}) / len(g.completions) for g in groups]
    return sum(ratios) / len(ratios) if ratios else 1.0


def copies_chance(completion: Completion, copies: int, generations: int) -> float:
    """Return P(at least `copies` - 1 of the other `generations` - 1 samples equal this completion), a binomial tail."""
    p = math.exp(min(0.0, math.fsum(completion.logprobs)))
    n = generations - 1
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(copies - 1, n + 1))


def _copies_message(group: Group, completion: Completion, copies: int, chance: float) -> str:
    seeds = [c.seed for c in group.completions if c.token_ids == completion.token_ids]
    probability = math.exp(math.fsum(completion.logprobs))
    return (
        f"{group.prompt.uid}: {copies} of {len(group.completions)} completions are the same "
        f"{len(completion.token_ids)} tokens ({completion.text[:60]!r}), though the policy gives them probability "
        f"{probability:.2g}; independent samples do this with chance {chance:.1g}. Seeds of the copies: {seeds}. "
        "Likely the engine shared one generator or ignored its "
        "seeds; compare the seeds above with those of the other groups in the rollout log"
    )


# the log-prob gap ----------------------------------------------------------------------------

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean gap per token, in nats. In float32 two sound engines differ by about 1e-6, and by up to 1e-4
if a GPU rounds convolutions to TF32; in bfloat16 by 0.001 to 0.03, more for deeper models."""
MAX_GAP_PER_MOVE = 10.0
"""Largest mean gap of samples of older weights, as a multiple of the learner's move since them
(`VerifiedSync.moved_since`)."""


@dataclass(frozen=True)
class LogprobGap:
    """|difference| of the engine's and the learner's log-probs of the same `tokens` tokens, in nats per token."""

    mean: float
    max: float
    tokens: int

    @classmethod
    def of(cls, differences: Tensor) -> LogprobGap:
        """Return the gap over signed differences [N]; NaN if one of them is, or there are none."""
        sizes = differences.abs()
        return cls(float(sizes.mean()), float(sizes.max()) if len(sizes) else math.nan, len(sizes))


def sampled_gap(gap: LogprobGap, limit: float, move: float = 0.0) -> str | None:
    """Return a message if samples are too far from the learner, which has moved by `move` nats since their weights.

    A move of 0 is for samples of its own weights, infinity for an unknown move, which bounds nothing.
    """
    return logp_gap(gap, max(limit, MAX_GAP_PER_MOVE * move))


def limit_for(dtype: str) -> float:
    """Return the largest sound mean gap per token for the weights' number format, in nats.

    >>> limit_for("torch.float32"), limit_for("bfloat16")
    (0.001, 0.1)
    """
    return LIMITS.get(dtype.removeprefix("torch."), LIMITS["bfloat16"])


def logp_gap(gap: LogprobGap, limit: float, tokens: str = "the tokens that it sampled") -> str | None:
    """Return a message if the mean gap is past `limit` or not a number, else None. `tokens` says which were scored.

    Engine and learner compute the same function of the same weights, so only rounding is sound. A larger gap means that
    the gradient is taken of another distribution than the one that was sampled from.
    """
    if gap.mean <= limit:
        return None
    return (
        f"the engine's log-probs of {tokens} differ from the learner's by {gap.mean:.3g} per token on average, "
        f"{gap.max:.3g} at most; the limit is {limit:g}. Likely the engine holds other weights, was given another "
        "image, or samples at another temperature or under another mask; `mm-grpo doctor CONFIG` compares the two. Set "
        "run.guards.logp_gap only where the gap comes from the number format (model.dtype)"
    )


# unread images: a model whose image does not reach its text layers trains without an error (pixel values are dropped,
# placeholders are not replaced by features, a mask hides them), and the parity check does not see it if the engine
# makes the same mistake. So the canary of the weight sync is scored once more with other pixels. Attention sees every
# token of the prompt, so an image that is read changes log-probs by rounding at least. A model that answers from the
# text alone although it could look is found by shuffled images in evaluation, not here.

MEASURE_EVERY = 50
"""Steps from one measurement to the next."""


def is_due(step: int) -> bool:
    """Return True for the steps that measure: the first, and every 50th, in a resumed run too."""
    return step == 1 or step % MEASURE_EVERY == 0


def with_other_pixels(prompt: Prompt) -> Prompt | None:
    """Return the prompt with every pixel value 0 (mid-grey, mostly), of the same shape; None if it has no pixels.

    Pixels are the floating tensors of `vision`; grids and masks are whole numbers. A tensor of zeros becomes ones.
    """
    pixels = {k: t for k, t in prompt.vision.items() if t.is_floating_point()}
    if not pixels:
        return None
    other_pixels = {k: torch.zeros_like(t) if t.any() else torch.ones_like(t) for k, t in pixels.items()}
    return replace(prompt, vision={**prompt.vision, **other_pixels})


def unread_images(change: float, uid: str) -> str | None:
    """Return a message if other pixels changed a completion's log-probs by a mean `change` of exactly 0, else None."""
    if change != 0.0:
        return None
    return (
        f"the learner's log-probs of a completion of {uid} are the same to the last bit when its images and videos are "
        "replaced by others: they do not reach the text layers. Likely the processor makes no media tokens or pixels "
        "for the row, or the model does not put their features in their places; see `mm-grpo doctor CONFIG`"
    )


def update_happens(record: UpdateRecord) -> str | None:
    """Return a message if the update did not happen though it should have, else None.

    Healthy zeros pass: warm-up at rate 0, a batch whose live tokens are all clipped or masked, groups of equal rewards.
    """
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
    """Return a message if a step's mean loss is infinite or NaN, else None."""
    if math.isfinite(loss):
        return None
    return (
        f"the loss is {loss}; lower optim.learning_rate, check the rewards for huge values and the engine's log-probs, "
        "or train in float32 (model.dtype)"
    )
