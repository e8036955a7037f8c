"""The KL penalty against the reference policy, token by token, from samples of the policy.

With d = ref_logp - logp (Schulman 2020, http://joschu.net/blog/kl-approx.html):

    k2 = d^2 / 2         biased, never negative; its gradient is that of the KL divergence
    k3 = exp(d) - d - 1  unbiased, never negative; GRPO's (arXiv:2402.03300, eq. 4)

The plain estimate -d is missing on purpose: inside a loss its gradient has mean 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate [M] of KL(policy || reference) in nats."""
    return (ref_logp - logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate [M] of KL(policy || reference) in nats."""
    d = ref_logp - logp
    return torch.exp(d) - d - 1


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}
