"""The loss of one pack, put together from the pure functions of `algorithm`.

    loss = sum over tokens of  w[c] * (surrogate_t + beta * k3_t - entropy_coef * entropy_t)

with w[c] the weight of completion c's tokens (see `algorithm/losses`), whose denominators count the
whole update. A pack's loss is a partial sum, so packs, accumulation and processes add up to one update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.algorithm.kl import k3
from mm_grpo.algorithm.surrogate import clipped_surrogate
from mm_grpo.config import AlgorithmConfig


@dataclass(frozen=True)
class Terms:
    """What the loss needs to know of each completion of the update: advantage [R] and token weight [R]."""

    advantages: Tensor
    weights: Tensor


class Tally:
    """Sums over tokens, kept while packs go by, and the means that become metrics."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.live_tokens = 0

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach().double().sum())

    def metrics(self) -> Mapping[str, float]:
        """Means per active token, under TRL's metric names."""
        tokens = max(self.sums.get("tokens", 0.0), 1.0)
        low, high = self.sums.get("low", 0.0) / tokens, self.sums.get("high", 0.0) / tokens
        metrics = {
            "loss": self.sums.get("loss", 0.0),
            "entropy": self.sums.get("entropy", 0.0) / tokens,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }
        if "kl" in self.sums:
            metrics["kl"] = self.sums["kl"] / tokens
        return metrics


def pack_loss(
    config: AlgorithmConfig,
    terms: Terms,
    owners: Tensor,
    logp: Tensor,
    entropy: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | None,
    tally: Tally,
) -> Tensor:
    """The pack's share of the loss, from values [M] of its tokens; `owners` [M] name their completions.

    Sums for the metrics go to `tally`. Tokens of weight 0 (masked completions) leave no trace.
    """
    advantages = terms.advantages[owners].to(logp)
    weights = terms.weights[owners].to(logp)
    active = weights > 0
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    surrogate = clipped_surrogate(logp, old_logp, advantages, config.epsilon, high)
    token_loss = surrogate.loss - config.entropy_coef * entropy
    if ref_logp is not None:
        penalty = k3(logp, ref_logp)
        token_loss = token_loss + config.beta * penalty
        tally.add(kl=penalty[active])
    loss = (weights * token_loss).sum()
    clipped = surrogate.clipped_low | surrogate.clipped_high
    tally.live_tokens += int((active & ~clipped & (advantages != 0)).sum())
    tally.add(
        loss=loss,
        tokens=active,
        entropy=entropy[active],
        low=surrogate.clipped_low[active],
        high=surrogate.clipped_high[active],
    )
    return loss


def terms_of(advantages: list[float], weights: Tensor, device: torch.device) -> Terms:
    return Terms(torch.tensor(advantages, dtype=torch.float64, device=device), weights.to(device))
