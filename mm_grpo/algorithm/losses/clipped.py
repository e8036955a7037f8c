"""The clipped term that most loss types share; they differ in how they weigh it."""

from __future__ import annotations

from mm_grpo.algorithm.importance import log_importance
from mm_grpo.algorithm.losses.tokens import Tokens
from mm_grpo.algorithm.surrogate import Surrogate, clipped_surrogate
from mm_grpo.config import AlgorithmConfig


def token_loss(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """PPO's clipped surrogate at the config's importance level."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    weight = log_importance(tokens.log_ratio, tokens.owners, config.importance_sampling_level)
    return clipped_surrogate(weight, tokens.advantages, config.epsilon, high, config.delta)
