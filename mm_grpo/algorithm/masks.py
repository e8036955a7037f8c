"""Masks of tokens that enter the loss.

`top_entropy_mask` selects the share of tokens at which the policy was least sure (`algorithm.top_entropy_quantile`,
Wang et al. 2025, arXiv:2506.01939): forks in the text, where a choice was made. The KL term is not
masked: it holds at every token, as in TRL.

The threshold is TRL's `torch.quantile(entropies, 1 - share)`, found by rank: interpolation between two
neighbours decides nothing, since no token lies between them, and `torch.quantile` refuses more than 2^24
values. Departure: TRL takes it over each micro-batch, here it is over all tokens of the update, so that packs and
processes change no result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TIED = 1e-5
"""Nats by which two entropies that are the same may differ: the first tokens of all answers to one prompt are
equally unsure, and each pack rounds them in its own way."""


def entropy_threshold(entropies: Tensor, share: float) -> float:
    """Return the least entropy of the top `share` of tokens, from the entropies [N] of all active tokens.

    With n tokens, floor(share * (n - 1)) + 1 of them reach it, and more if some are tied with the last; one always
    does. `share` is in (0, 1]. Infinity if there is no token.
    """
    n = entropies.numel()
    if n == 0:
        return math.inf
    # 0.29 * 100 is 28.999999999999996 in double precision; the margin is far above such rounding.
    count = math.floor(share * (n - 1) + 1e-6) + 1
    return float(torch.kthvalue(entropies.detach().flatten(), n - count + 1).values)


def top_entropy_mask(entropies: Tensor, share: float) -> Tensor:
    """Return True [N] for the tokens among the top `share` by entropy, and for tokens tied with the last of them, up to
    rounding. `entropies` [N] of all active tokens are in nats."""
    return entropies >= entropy_threshold(entropies, share) - TIED
