"""The KL penalty against the reference policy, token by token.

`k3` is the low-variance, non-negative estimator used by GRPO (Schulman 2020,
http://joschu.net/blog/kl-approx.html; arXiv:2402.03300, eq. 4):

    k3 = exp(d) - d - 1,   d = ref_logp - logp
"""

from __future__ import annotations

import torch
from torch import Tensor


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate [M] of KL(policy || reference) in nats from samples of the policy."""
    d = ref_logp - logp
    return torch.exp(d) - d - 1
