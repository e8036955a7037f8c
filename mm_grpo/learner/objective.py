"""The loss of one pack, put together from the pure functions of `algorithm`.

    loss = sum over tokens of  w[c] * (m_t * term_t + beta * kl_t) - entropy_coef * entropy_t / tokens

with w[c] the weight of completion c's tokens and term_t that of the loss type (see `algorithm/losses`), m_t
the corrections for a policy that is not the one that sampled, and 0 for tokens outside the top entropies.
Entropy is averaged over all other tokens whatever the loss type, as in TRL. Denominators count the whole
update. A pack's loss is a partial sum, so packs, accumulation and processes add up to one update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.algorithm.correction import mismatch_weights, off_policy_keep
from mm_grpo.algorithm.kl import ESTIMATORS
from mm_grpo.algorithm.losses import LOSSES
from mm_grpo.algorithm.losses.tokens import Tokens
from mm_grpo.config import AlgorithmConfig


@dataclass(frozen=True)
class Terms:
    """What the loss needs to know of each completion of the update: advantage [R] and token weight [R].

    `tokens` counts the tokens of the whole update that the entropy bonus is averaged over.
    """

    advantages: Tensor
    weights: Tensor
    tokens: int


class Tally:
    """Sums over tokens, kept while packs go by, and the means that become metrics.

    `counted` are the active tokens, with those that are left out because they cannot change an update.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.live_tokens = 0

    def count(self, tokens: int) -> None:
        self.sums["counted"] = self.sums.get("counted", 0.0) + tokens

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach().double().sum())

    def metrics(self, updates: int = 1) -> Mapping[str, float]:
        """The mean loss of `updates`, and means per token, under TRL's metric names.

        Shares of clipped tokens are of all that counted, for one that is left out is never clipped. The other
        means are of the tokens that were run, and absent where none was.
        """
        tokens = self.sums.get("tokens", 0.0)
        counted = max(self.sums.get("counted", tokens), 1.0)
        low, high = self.sums.get("low", 0.0) / counted, self.sums.get("high", 0.0) / counted
        metrics = {
            "loss": self.sums.get("loss", 0.0) / updates,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }
        if not tokens:
            return metrics
        metrics["entropy"] = self.sums["entropy"] / tokens
        if "kl" in self.sums:
            metrics["kl"] = self.sums["kl"] / tokens
        if "importance" in self.sums:
            metrics["sampling/importance_sampling_ratio/mean"] = self.sums["importance"] / tokens
            metrics["sampling/masked_ratio"] = self.sums["masked"] / tokens
        return metrics


@dataclass(frozen=True)
class PackTokens:
    """The M tokens of a pack: who owns them, and their values under each policy that the loss asks for.

    `logp` and `entropy` carry gradients; `sampling_logp` is the engine's, `ref_logp` None without a KL term.
    `chosen` is 1 for tokens of the top entropies and 0 for others, None where all are taken.
    """

    owners: Tensor
    logp: Tensor
    entropy: Tensor
    old_logp: Tensor
    sampling_logp: Tensor
    ref_logp: Tensor | None
    chosen: Tensor | None = None


def pack_loss(config: AlgorithmConfig, terms: Terms, pack: PackTokens, tally: Tally) -> Tensor:
    """The pack's share of the loss. Sums for the metrics go to `tally`.

    Tokens of weight 0 (masked completions) leave no trace.
    """
    logp = pack.logp
    advantages = terms.advantages[pack.owners].to(logp)
    weights = terms.weights[pack.owners].to(logp)
    active = weights > 0
    correction = _correction(config, pack)
    tokens = Tokens(logp, pack.old_logp, advantages, pack.owners, correction)
    term = LOSSES[config.loss_type].token_loss(tokens, config)
    keep = _keep(config, pack, advantages)
    token_loss = term.loss * keep
    if correction is not None:
        tally.add(importance=correction[active], masked=(correction == 0)[active])
        if config.loss_type != "vespo":  # which has it inside
            token_loss = token_loss * correction
    if pack.ref_logp is not None:
        penalty = ESTIMATORS[config.kl_estimator](logp, pack.ref_logp)
        token_loss = token_loss + config.beta * penalty
        tally.add(kl=penalty[active])
    loss = (weights * token_loss).sum()
    if config.entropy_coef:
        bonus = pack.entropy * active if pack.chosen is None else pack.entropy * active * pack.chosen
        loss = loss - config.entropy_coef * bonus.sum() / max(terms.tokens, 1)
    silent = term.clipped_low | term.clipped_high | term.capped | (keep == 0)
    if correction is not None:
        silent = silent | (correction == 0)
    tally.live_tokens += int((active & ~silent & (advantages != 0)).sum())
    tally.add(
        loss=loss,
        tokens=active,
        entropy=pack.entropy[active],
        low=term.clipped_low[active],
        high=term.clipped_high[active],
    )
    return loss


def _correction(config: AlgorithmConfig, pack: PackTokens) -> Tensor | None:
    """Mismatch weights [M], None when the config asks for none."""
    if config.importance_sampling_mode == "none":
        return None
    return mismatch_weights(
        pack.old_logp,
        pack.sampling_logp,
        pack.owners,
        config.importance_sampling_mode,
        config.importance_sampling_clip_min,
        config.importance_sampling_clip_max,
    )


def _keep(config: AlgorithmConfig, pack: PackTokens, advantages: Tensor) -> Tensor:
    """1 for tokens [M] that stay, 0 for those outside the top entropies or of completions too far off the policy."""
    chosen = torch.ones_like(pack.logp) if pack.chosen is None else pack.chosen
    if config.off_policy_mask_threshold is None:
        return chosen
    threshold = config.off_policy_mask_threshold
    return chosen * off_policy_keep(pack.logp, pack.sampling_logp, advantages, pack.owners, threshold).to(
        pack.logp
    )
