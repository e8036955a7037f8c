"""The clipped policy-gradient term of each token (PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    loss_t = -min(min(ratio_t, delta) * A, clip(ratio_t, 1 - epsilon, 1 + epsilon_high) * A)

A separate upper bound `epsilon_high` is "clip-higher" of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 10).
`delta` bounds the ratio of tokens with a negative advantage, which the pair of bounds leaves open above
(two-sided clipping, INTELLECT-2, arXiv:2505.07291).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Per-token loss [M], and which tokens [M] the lower bound, the upper bound or `delta` silenced."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    capped: Tensor


def clipped_surrogate(
    log_weight: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """Loss of M tokens from their log importance weights and their completion's advantage, all [M].

    A token is clipped when the bound is active and takes its gradient away: below 1 - epsilon with a
    negative advantage, above 1 + epsilon_high with a positive one, above `delta` with a negative one.
    """
    ratio = torch.exp(log_weight)
    cap = math.inf if delta is None else delta
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    limited = ratio.clamp(max=cap)
    return Surrogate(
        loss=-torch.minimum(limited * advantages, bounded * advantages),
        clipped_low=(ratio.detach() < 1 - epsilon) & (advantages < 0),
        clipped_high=(ratio.detach() > 1 + epsilon_high) & (advantages > 0),
        capped=(ratio.detach() > cap) & (advantages < 0),
    )


def unclipped(loss: Tensor) -> Surrogate:
    """A loss that silences no token."""
    none = torch.zeros(loss.shape, dtype=torch.bool, device=loss.device)
    return Surrogate(loss, none, none, none)
