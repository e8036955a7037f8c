"""Importance weights: how much more probable the new policy makes a token, or a whole completion.

At token level the weight of a token is its own ratio. At sequence level (GSPO, Zheng et al. 2025,
arXiv:2507.18071) every token of a completion has the completion's length-normalised ratio, the
exponential of the mean log-ratio. `owners` [M] name the completion of each token; all tokens of a
completion are present.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]


def log_importance(log_ratio: Tensor, owners: Tensor, level: Level) -> Tensor:
    """Log importance weights [M] from log-ratios [M]; gradients flow through both levels."""
    return log_ratio if level == "token" else sequence_mean(log_ratio, owners)


def sequence_sum(values: Tensor, owners: Tensor) -> Tensor:
    """For each token [M], the sum of `values` [M] over its completion."""
    _, index = torch.unique(owners, return_inverse=True)
    sums = values.new_zeros(int(index.max()) + 1).index_add(0, index, values)
    return sums[index]


def sequence_mean(values: Tensor, owners: Tensor) -> Tensor:
    """For each token [M], the mean of `values` [M] over its completion."""
    return sequence_sum(values, owners) / sequence_sum(torch.ones_like(values), owners)
