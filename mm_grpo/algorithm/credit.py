"""Credit by sight: tokens' advantages are weighed by how much each sampled token depends on its image.

    A_t  <-  w_t * A_t

A rule makes the weights w of an update's completions from S, the dependencies of their tokens in nats. Weights are
constants: no gradient flows through them. Rules see only completions that have an advantage and images, and compare
with their prompt with masked images (perception.py), the control; all others keep the weight 1.

In both papers S is the KL divergence of two distributions over the vocabulary. Here it is k3 of kl.py, its estimate
from the sampled token, with the bounds of perception.py, as in the code of VPPO's authors.

Axes: [T], the tokens of a completion, which differ between completions. A rule is one function and one
line of `rule_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mm_grpo.algorithm.perception import perception_kl
from mm_grpo.config.sections import PgpoConfig, VppoConfig

MIN_RANGE = 1e-4
"""Nats between the largest and the smallest dependency below which they are equal: a ratio of probabilities of 1.014 or
less, which is rounding in bf16, and which a scale from 0 to 1 would blow up."""


def dependency(logp: Tensor, control_logp: Tensor) -> Tensor:
    """Return S [T] in nats, >= 0, from log-probs [T] of sampled tokens after their own image and after the control."""
    return perception_kl(logp.double(), control_logp.double())


def pgpo(dependencies: Sequence[Tensor], tau: float, beta: float) -> list[Tensor]:
    """Weights [T] that grow with the dependency, and sum to T in each completion (PGPO, arXiv:2604.01840, eq. 6 and 7).

        I_t = (l_t - min l) / (max l - min l)        l_t = log(1 + S_t), over the completion
        v_t = I_t / tau                              if I_t < tau
              1 + beta * (I_t - tau) / (1 - tau)     otherwise
        w_t = v_t * T / sum v

    Departures: the paper's S compares with a model that attends to no image token, here it is the control; a completion
    of equal dependencies (`MIN_RANGE`), of which the paper says nothing, has weights 1.
    """
    return [_gated(torch.log1p(s), tau, beta) for s in dependencies]


def _gated(logs: Tensor, tau: float, beta: float) -> Tensor:
    low, high = logs.min(), logs.max()
    if high - low < MIN_RANGE:
        return torch.ones_like(logs)
    scaled = (logs - low) / (high - low)
    raised = 1 + beta * (scaled - tau) / max(1 - tau, 1e-9)  # at tau = 1 only for what is 1
    raw = torch.where(scaled < tau, scaled / tau, raised)
    return raw * len(raw) / raw.sum()


def vppo(
    dependencies: Sequence[Tensor], means: Sequence[float], top_share: float, beta_min: float
) -> list[Tensor]:
    """Weights [T], one number for a completion's most dependent tokens, 0 for others (VPPO, arXiv:2510.09285).

        w_t   = alpha * [S_t is one of the ceil(top_share * T) largest of its completion]
        alpha = beta_min + (beta_max - beta_min) * n      n = (mean S - min) / (max - min)

    min and max are over `means`, the mean dependencies of all completions of the update. As in the authors' code
    beta_max is beta_min + (1 - beta_min) / (mean of n), with which the mean of alpha is 1. Departures: their code takes
    min, max and mean over parts of an update, by process and micro-batch. Alpha is 1 if means are equal (`MIN_RANGE`).
    A completion of equal dependencies keeps all its tokens; of single equal ones the first are the largest.
    """
    low, high = min(means, default=0.0), max(means, default=0.0)
    equal = high - low < MIN_RANGE
    mean = 1.0 if equal else math.fsum(m - low for m in means) / (high - low) / len(means)
    slope = 0.0 if equal else (1 - beta_min) / mean / (high - low)
    start = 1.0 if equal else beta_min
    weights = []
    for s in dependencies:
        share = 1.0 if s.max() - s.min() < MIN_RANGE else top_share
        first = s.argsort(descending=True, stable=True)[: math.ceil(share * len(s) - 1e-9)]
        alpha = start + slope * (float(s.mean()) - low)
        weights.append(torch.zeros_like(s).index_fill(0, first, alpha))
    return weights


def keep_mass(weights: Sequence[Tensor], advantages: Sequence[Tensor]) -> list[Tensor]:
    """Scale a group's weights so that they do not change the sum of |A_t| over its tokens; all 1 if they make it 0.

    PGPO keeps the sum in each completion; this is a departure from VPPO, in which it falls to about `top_share`.
    """
    before = sum(float(a.abs().sum()) for a in advantages)
    after = sum(float((w * a).abs().sum()) for w, a in zip(weights, advantages, strict=True))
    return [w * (before / after) if after else torch.ones_like(w) for w in weights]


def rule_weights(
    dependencies: Sequence[Tensor], means: Sequence[float], options: PgpoConfig | VppoConfig
) -> list[Tensor]:
    """Weights [T] by the rule of `algorithm.credit`; `means` are as in `vppo`."""
    if options.rule == "pgpo":
        return pgpo(dependencies, options.tau, options.beta)
    return vppo(dependencies, means, options.top_share, options.beta_min)
