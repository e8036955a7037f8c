"""The loss of one pack, put together from the pure functions of `algorithm`.

    loss = sum over tokens of  w[c] * (m_t * loss_t + beta * kl_t) - entropy_coef * entropy_t / tokens

with w[c] the weight of completion c's tokens and loss_t that of the loss type (both `algorithm/losses.py`), and
m_t the corrections for a policy that is not the one that sampled, 0 for tokens that are masked. The entropy is averaged
over all other tokens whatever the loss type, as in TRL. Denominators count the whole update. A pack's loss is a partial
sum, so packs, accumulation and processes add up to one update. Loss features (`features/`) add terms of their own.

Axes: [M], the completion tokens of the pack; [R], the completions of this process's step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.algorithm.correction import mismatch_weights, off_policy_keep
from mm_grpo.algorithm.kl import ESTIMATORS
from mm_grpo.algorithm.losses import LOSSES, Tokens
from mm_grpo.config import AlgorithmConfig
from mm_grpo.learner.step_report import LossStatistics


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the loss for each completion: advantage [R] and token weight [R], 0 outside the update.

    `tokens` counts the tokens of the whole update that the entropy bonus is averaged over.
    """

    advantages: Tensor
    weights: Tensor
    tokens: int


@dataclass(frozen=True)
class PackTokens:
    """The M tokens of a pack: their completions, and their values under each policy that the loss compares."""

    completion_index: Tensor
    logp: Tensor
    """Log-probs under the policy, with gradients."""
    entropy: Tensor
    """Entropies of the policy, with gradients."""
    old_logp: Tensor
    """Log-probs under the policy at the start of the step."""
    sampling_logp: Tensor
    """The engine's log-probs."""
    ref_logp: Tensor | None
    """Log-probs under the reference; None without a KL term."""
    mask: Tensor | None = None
    """1 for tokens that keep their term, 0 for others; None if all keep it."""
    advantages: Tensor | None = None
    """Advantages of single tokens; None if all tokens of a completion have its advantage."""


def pack_loss(
    config: AlgorithmConfig, inputs: LossInputs, pack: PackTokens, statistics: LossStatistics
) -> Tensor:
    """Return the pack's share of the loss of the update, a scalar, and add sums for the metrics to `statistics`.

    Tokens of weight 0 (masked completions) enter neither.
    """
    logp, index, correction = pack.logp, pack.completion_index, None
    advantages = (inputs.advantages[index] if pack.advantages is None else pack.advantages).to(logp)
    weights = inputs.weights[index].to(logp)
    active = weights > 0
    if config.correction is not None:
        clip = config.importance_sampling_clip_min, config.importance_sampling_clip_max
        correction = mismatch_weights(pack.old_logp, pack.sampling_logp, index, config.correction, *clip)
    tokens = Tokens(logp, pack.old_logp, advantages, index, correction)
    term = LOSSES[config.loss_type].token_loss(tokens, config)
    keep = torch.ones_like(logp) if pack.mask is None else pack.mask
    if config.off_policy_mask_threshold is not None:
        drift = config.off_policy_mask_threshold
        near = off_policy_keep(logp, pack.sampling_logp, advantages, index, drift)
        keep = keep * near.to(logp)
        statistics.add(active, negative=advantages < 0, off_policy=~near)
    token_loss = term.loss * keep
    no_gradient = term.clipped_low | term.clipped_high | term.capped | (keep == 0)
    if correction is not None:
        no_gradient = no_gradient | (correction == 0)
        statistics.add(active, importance=correction, masked=correction == 0)
        # vespo's weight contains the correction
        if config.loss_type != "vespo":
            token_loss = token_loss * correction
    if pack.ref_logp is not None:
        kl = ESTIMATORS[config.kl_estimator](logp, pack.ref_logp)
        # after `keep`, because masked tokens keep their KL
        token_loss = token_loss + config.beta * kl
        statistics.add(active, kl=kl)
    loss = (weights * token_loss).sum()
    if config.entropy_coef:
        bonus = pack.entropy * active if pack.mask is None else pack.entropy * active * pack.mask
        loss = loss - config.entropy_coef * bonus.sum() / max(inputs.tokens, 1)
    live = active & ~no_gradient & (advantages != 0)
    statistics.add(tokens=active, live=live)
    statistics.add(active, entropy=pack.entropy, low=term.clipped_low, high=term.clipped_high)
    return loss
