"""`grpo`: mean over a completion's tokens, then over completions (arXiv:2402.03300, eq. 3).

Each completion counts once, so a token of a long answer weighs less than one of a short answer.
"""

from __future__ import annotations

from torch import Tensor


def weights(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (R * length) for each of R completions; a masked completion stays in R, as in TRL."""
    return 1.0 / (len(lengths) * lengths.clamp(min=1).double())
