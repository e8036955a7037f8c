"""The clipped policy-gradient term of each token (PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    loss_t = -min(ratio_t * A, clip(ratio_t, 1 - epsilon, 1 + epsilon_high) * A)
    ratio_t = exp(logp_t - old_logp_t)

A separate upper bound `epsilon_high` is "clip-higher" of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 10).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Per-token loss [M], the ratio [M], and which tokens [M] the lower or upper bound silenced."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float
) -> Surrogate:
    """Loss of M tokens from their new and old log-probabilities and their completion's advantage, all [M].

    A token is clipped when the bound is active and takes its gradient away: below 1 - epsilon with a
    negative advantage, above 1 + epsilon_high with a positive one.
    """
    ratio = torch.exp(logp - old_logp)
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    return Surrogate(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=(ratio.detach() < 1 - epsilon) & (advantages < 0),
        clipped_high=(ratio.detach() > 1 + epsilon_high) & (advantages > 0),
    )
