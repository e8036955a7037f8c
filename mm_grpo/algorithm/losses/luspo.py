"""`luspo`: sums over tokens, means over completions (LUSPO, arXiv:2602.05261).

A completion's loss grows with its length, which undoes the length bias of sequence-level weights; use it
with `importance_sampling_level: sequence`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / R for every token of each of R completions."""
    return torch.full(lengths.shape, 1.0 / max(len(lengths), 1), dtype=torch.float64)
