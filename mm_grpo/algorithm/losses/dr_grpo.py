"""`dr_grpo`: a constant denominator (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2).

Dividing by the length limit instead of the length removes the bias towards long wrong answers. Pair
it with `scale_rewards: none`, which removes the other bias the paper names.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (R * max_completion_length)."""
    return torch.full(lengths.shape, 1.0 / max(len(lengths) * max_completion_length, 1), dtype=torch.float64)
