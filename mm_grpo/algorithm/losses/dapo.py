"""`dapo`: mean over all tokens of the update (token-level loss of DAPO, arXiv:2503.14476, eq. 8).

Every token counts the same, whatever the length of its answer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (tokens of the whole update)."""
    return torch.full(lengths.shape, 1.0 / max(int(lengths.sum()), 1), dtype=torch.float64)
