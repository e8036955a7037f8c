"""Estimators of the KL divergence from the reference policy, and the KL as a penalty on rewards.

With d = ref_logp - logp, per sampled token (Schulman 2020, http://joschu.net/blog/kl-approx.html):

    k1 = -d              unbiased, of either sign
    k2 = d^2 / 2         biased, never negative; its gradient is that of the KL divergence
    k3 = exp(d) - d - 1  unbiased, never negative; GRPO's (arXiv:2402.03300, eq. 4)

In the loss (`learner/loss.py` adds beta times the estimate of each token) the config refuses k1: its
gradient there has mean 0. In the reward (`algorithm.kl_in_reward`; RLOO, arXiv:2402.14740) it is the usual
one: a completion's log-ratio, the sum of k1 over its tokens, times beta, is subtracted from its reward before
advantages. The log-probabilities are then those of the policy that sampled. With k1 the policy gradient of
such a reward is that of the KL divergence; with k2 or k3 it is not.

Axes: [M] completion tokens, [T] tokens of one completion, [P][G] completions by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate [M] of KL(policy || reference) in nats."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate [M] of KL(policy || reference) in nats."""
    return (ref_logp - logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate [M] of KL(policy || reference) in nats."""
    d = ref_logp - logp
    return torch.exp(d) - d - 1


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def completion_kl(logp: Sequence[float], ref_logp: Sequence[float], estimator: str) -> float:
    """Return the KL of a completion in nats: the sum of the estimate over its sampled tokens, in double precision.

    `logp` [T] and `ref_logp` [T] are of the sampled tokens; an empty completion has 0. Raises ValueError if their
    lengths differ.
    """
    if len(logp) != len(ref_logp):
        raise ValueError(f"{len(logp)} log-probabilities for {len(ref_logp)} of the reference")
    pair = (torch.tensor(list(values), dtype=torch.float64) for values in (logp, ref_logp))
    return float(ESTIMATORS[estimator](*pair).sum())


def penalised(
    rewards: Sequence[Sequence[float | None]], penalties: Sequence[Sequence[float]]
) -> list[tuple[float | None, ...]]:
    """Return rewards [P][G] less their penalties [P][G]; None stays None: a penalty alone is no reward."""
    return [
        tuple(None if r is None else r - cost for r, cost in zip(row, costs, strict=True))
        for row, costs in zip(rewards, penalties, strict=True)
    ]
