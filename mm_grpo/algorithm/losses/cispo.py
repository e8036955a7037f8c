"""`cispo`: every token keeps its gradient, its weight is clipped (MiniMax-M1, arXiv:2506.13585).

    loss_t = -stop_gradient(min(ratio_t, epsilon_high)) * A * logp_t

As in TRL, `epsilon_high` is here the bound itself, not a distance from 1 (the paper's 1 + epsilon);
values around 5 are usual. Tokens are averaged as in `dapo`.
"""

from __future__ import annotations

import torch

from mm_grpo.algorithm.importance import log_importance
from mm_grpo.algorithm.losses.tokens import Tokens
from mm_grpo.algorithm.surrogate import Surrogate, unclipped
from mm_grpo.config import AlgorithmConfig


def token_loss(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """REINFORCE with a clipped importance weight; no token is silenced, those whose weight was cut neither."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    weight = log_importance(tokens.log_ratio, tokens.owners, config.importance_sampling_level)
    ratio = torch.exp(weight).detach()
    return unclipped(-ratio.clamp(max=high) * tokens.advantages * tokens.logp)
