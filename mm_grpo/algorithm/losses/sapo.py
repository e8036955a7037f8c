"""`sapo`: a soft gate in place of the hard clip (SAPO, arXiv:2511.20347).

    loss_t = -sigmoid(tau * (ratio_t - 1)) * 4 / tau * A

`tau` is `sapo_temperature_pos` for positive advantages and `sapo_temperature_neg` for others; the gate's
slope at ratio 1 is 1 whatever tau is. Completions are averaged as in `grpo`.
"""

from __future__ import annotations

import torch

from mm_grpo.algorithm.importance import log_importance
from mm_grpo.algorithm.losses.tokens import Tokens
from mm_grpo.algorithm.surrogate import Surrogate, unclipped
from mm_grpo.config import AlgorithmConfig


def token_loss(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """The gated term; no token is silenced."""
    ratio = torch.exp(log_importance(tokens.log_ratio, tokens.owners, config.importance_sampling_level))
    tau = torch.where(tokens.advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
    return unclipped(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * tokens.advantages)
