"""Loss types: what a token contributes, and how tokens are weighed into one number.

Each file holds an idea: `weights(lengths, max_completion_length) -> [R]`, the weight of every token of
completion r given the token counts of all R completions of the update (0 for a masked one), or
`token_loss(tokens, config) -> Surrogate`, the term of each token, or both; what a file lacks it takes
from a sibling in `LOSSES`. The loss is the sum over tokens of weight times term, wherever the tokens
happen to be computed: packs, accumulation and processes cannot change it.

A new type is one file, one line in `LOSSES` and one word in the config's `loss_type`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mm_grpo.algorithm.losses import cispo, clipped, dapo, dr_grpo, grpo, luspo, sapo, vespo
from mm_grpo.algorithm.losses.tokens import Tokens
from mm_grpo.algorithm.surrogate import Surrogate
from mm_grpo.config import AlgorithmConfig


class Loss(NamedTuple):
    """A loss type: the weights [R] of completions' tokens and the term [M] of each token."""

    weights: Callable[[Tensor, int], Tensor]
    token_loss: Callable[[Tokens, AlgorithmConfig], Surrogate]


LOSSES: dict[str, Loss] = {
    "grpo": Loss(grpo.weights, clipped.token_loss),
    "bnpo": Loss(dapo.weights, clipped.token_loss),
    "dr_grpo": Loss(dr_grpo.weights, clipped.token_loss),
    "dapo": Loss(dapo.weights, clipped.token_loss),
    "cispo": Loss(dapo.weights, cispo.token_loss),
    "sapo": Loss(grpo.weights, sapo.token_loss),
    "luspo": Loss(luspo.weights, clipped.token_loss),
    "vespo": Loss(dapo.weights, vespo.token_loss),
}
# bnpo: TRL's mean over the tokens of one micro-batch depends on how an update is split. Here packs and
# processes change no result, the batch is the whole update, and bnpo is dapo.


def token_weights(loss_type: str, lengths: Tensor, max_completion_length: int) -> Tensor:
    """Weight [R] of each token of each completion, from token counts [R] and the length limit in tokens."""
    return LOSSES[loss_type].weights(lengths, max_completion_length)
