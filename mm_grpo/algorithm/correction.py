"""Importance weights and masks for a policy that is not the one that sampled.

`mismatch_weights` weigh tokens by learner probability over engine probability, truncated or masked
(TRL's `vllm_importance_sampling_mode`, whose modes and defaults these are). `off_policy_keep` drops
completions that have become improbable under the policy (off-policy sequence masking, DeepSeek-V3.2,
arXiv:2512.02556). Axes: [M] completion tokens, all tokens of a completion among them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mm_grpo.algorithm.losses import sequence_mean, sequence_sum
from mm_grpo.config.sections import CorrectionMode


def mismatch_weights(
    old_logp: Tensor,
    sampling_logp: Tensor,
    completion_index: Tensor,
    mode: CorrectionMode,
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """Weights [M] without gradient: exp(old - sampling), of the token or of its whole completion.

    `truncate` clamps them to [clip_min, clip_max], `mask` turns those outside to 0. None is no bound.
    """
    gap = (old_logp - sampling_logp).detach()
    weights = torch.exp(sequence_sum(gap, completion_index) if mode.startswith("sequence") else gap)
    if mode.endswith("truncate"):
        return weights.clamp(clip_min, clip_max) if clip_min is not None or clip_max is not None else weights
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def off_policy_keep(
    logp: Tensor, sampling_logp: Tensor, advantages: Tensor, completion_index: Tensor, threshold: float
) -> Tensor:
    """Keep tokens [M] of completions with advantage >= 0, or near enough to the policy.

    Near is a mean of sampling_logp - logp over the completion of at most `threshold` nats.
    """
    drift = sequence_mean((sampling_logp - logp).detach(), completion_index)
    return (advantages >= 0) | (drift <= threshold)
