"""`vespo`: REINFORCE weighed by a smooth function of the whole completion's ratio (VESPO, arXiv:2602.10693).

    loss_t = -phi(w) * A * logp_t,   phi(w) = exp(lambda) * w^k * exp(-lambda * w),   phi(1) = 1

w is the product of the ratios of the completion's tokens, times that of learner to engine where there is
a mismatch correction; phi carries no gradient. k and lambda differ by the sign of the advantage
(`vespo_k_pos`, `vespo_lambda_pos`, `vespo_k_neg`, `vespo_lambda_neg`). Bounds on logarithms are TRL's.
"""

from __future__ import annotations

import math

import torch

from mm_grpo.algorithm.importance import sequence_sum
from mm_grpo.algorithm.losses.tokens import Tokens
from mm_grpo.algorithm.surrogate import Surrogate, unclipped
from mm_grpo.config import AlgorithmConfig

LOWEST, HIGHEST = math.log(1e-8), 20.0


def token_loss(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """The weighed term; no token is silenced."""
    log_w = sequence_sum(tokens.log_ratio.detach().clamp(-HIGHEST, HIGHEST), tokens.owners)
    if tokens.correction is not None:
        gap = tokens.correction.log().clamp(LOWEST, HIGHEST)
        # in these modes every token has the weight of its whole completion already
        whole = config.importance_sampling_mode.startswith("sequence")
        log_w = log_w + (gap if whole else sequence_sum(gap, tokens.owners))
    log_w = log_w.clamp(LOWEST, HIGHEST)
    positive = tokens.advantages >= 0
    k = torch.where(positive, config.vespo_k_pos, config.vespo_k_neg)
    rate = torch.where(positive, config.vespo_lambda_pos, config.vespo_lambda_neg).clamp(min=1e-4)
    phi = torch.exp(rate + k * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return unclipped(-phi * tokens.advantages * tokens.logp)
