"""The loss of one pack, put together from the pure functions of `algorithm`.

    loss = sum over tokens of  w[c] * (m_t * loss_t + beta * kl_t) - entropy_coef * entropy_t / tokens
                               [ - w[c] * perception_coef * KL_prcp_t - its entropies / tokens ]
                               [ + w[c] * twin_view.coef * KL(teacher || policy)_t ]

with w[c] the weight of completion c's tokens and loss_t that of the loss type (both `algorithm/losses.py`), and
m_t the corrections for a policy that is not the one that sampled, 0 for tokens outside the top entropies. The
entropy is averaged over all other tokens whatever the loss type, as in TRL. Denominators count the whole
update. A pack's loss is a partial sum, so packs, accumulation and processes add up to one
update. The perception term (`algorithm/perception.py`) is that of tokens whose row has images, the last one that of
tokens whose row has a twin (`learner/twin_view.py`).

Axes: [M], the completion tokens of the pack; [R], the completions of this process's step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.algorithm.correction import mismatch_weights, off_policy_keep
from mm_grpo.algorithm.kl import ESTIMATORS
from mm_grpo.algorithm.losses import LOSSES, Tokens
from mm_grpo.algorithm.perception import perception_kl
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
    """The M tokens of a pack: their completions, and their values under each policy that the loss compares.

    `logp` and `entropy` carry gradients; `sampling_logp` is the engine's, `ref_logp` None without a KL term.
    `chosen` is 1 for tokens of the top entropies and 0 for others, None where all are taken. `advantages` are those of
    the tokens' turns, None where a completion has one. `masked_logp`, with gradients, are those after the masked
    images, of the tokens that are `pictured` [M]; None without a perception term. `twin_kl` [M], with gradients, is the
    KL from the teacher of the tokens that are `taught` [M]; None where none is.
    """

    completion_index: Tensor
    logp: Tensor
    entropy: Tensor
    old_logp: Tensor
    sampling_logp: Tensor
    ref_logp: Tensor | None
    chosen: Tensor | None = None
    advantages: Tensor | None = None
    masked_logp: Tensor | None = None
    pictured: Tensor | None = None
    twin_kl: Tensor | None = None
    taught: Tensor | None = None


def pack_loss(
    config: AlgorithmConfig, inputs: LossInputs, pack: PackTokens, statistics: LossStatistics
) -> Tensor:
    """The pack's share of the loss of the update, a scalar. Sums for the metrics are added to `statistics`.

    Tokens of weight 0 (masked completions) enter neither.
    """
    logp = pack.logp
    advantages = inputs.advantages[pack.completion_index] if pack.advantages is None else pack.advantages
    advantages = advantages.to(logp)
    weights = inputs.weights[pack.completion_index].to(logp)
    active = weights > 0
    index, correction, mode = pack.completion_index, None, config.importance_sampling_mode
    # `GRPOConfig.with_correction` has put something else where auto is more than none
    if mode != "none" and mode != "auto":
        clip = config.importance_sampling_clip_min, config.importance_sampling_clip_max
        correction = mismatch_weights(pack.old_logp, pack.sampling_logp, index, mode, *clip)
    tokens = Tokens(logp, pack.old_logp, advantages, index, correction)
    term = LOSSES[config.loss_type].token_loss(tokens, config)
    keep = torch.ones_like(logp) if pack.chosen is None else pack.chosen
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
        if config.loss_type != "vespo":  # which has it inside
            token_loss = token_loss * correction
    if pack.ref_logp is not None:
        kl = ESTIMATORS[config.kl_estimator](logp, pack.ref_logp)
        token_loss = token_loss + config.beta * kl
        statistics.add(active, kl=kl)
    loss = (weights * token_loss).sum()
    if config.entropy_coef:
        bonus = pack.entropy * active if pack.chosen is None else pack.entropy * active * pack.chosen
        loss = loss - config.entropy_coef * bonus.sum() / max(inputs.tokens, 1)
    if pack.masked_logp is not None and pack.pictured is not None:
        seen = pack.pictured
        chosen = None if pack.chosen is None else pack.chosen[seen]
        loss = loss + _perception(
            config, inputs, logp[seen], pack.masked_logp, weights[seen], chosen, statistics
        )
    if config.twin_view is not None and pack.taught is not None:
        taught = active & pack.taught
        statistics.add(taught=taught)
        if pack.twin_kl is not None:
            loss = loss + config.twin_view.coef * (weights * pack.twin_kl * taught).sum()
            statistics.add(taught, twin_kl=pack.twin_kl)
    live = active & ~no_gradient & (advantages != 0)
    statistics.add(loss=loss, tokens=active, live=live)
    statistics.add(active, entropy=pack.entropy, low=term.clipped_low, high=term.clipped_high)
    return loss


def _perception(
    config: AlgorithmConfig,
    inputs: LossInputs,
    logp: Tensor,
    masked_logp: Tensor,
    weights: Tensor,
    chosen: Tensor | None,
    statistics: LossStatistics,
) -> Tensor:
    """The perception term of tokens of rows with images, a scalar.

    KL_prcp is weighed as the KL is, and the entropies are those of the tokens that the entropy bonus takes.
    """
    active, kl = weights > 0, perception_kl(logp, masked_logp)
    statistics.add(active, perception_kl=kl, pictured=active)
    loss = -config.perception_coef * (weights * kl).sum()
    if entropy_coef := config.option("perception_entropy_coef"):
        kept = active if chosen is None else active * chosen
        both = ((logp + masked_logp) * kept).sum()
        loss = loss - entropy_coef * both / max(inputs.tokens, 1)
    return loss
