"""Loss types: how the tokens of an update are weighed into one number.

Each file holds one function `weights(lengths, max_completion_length) -> [R]`: the weight of every
token of completion r, given the token counts of all R completions of the update (0 for a masked
one). The loss is then the sum over tokens of weight times token term, wherever the tokens happen to
be computed: packs, accumulation and processes cannot change it.

A new type is one file and one line in `LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mm_grpo.algorithm.losses import bnpo, dapo, dr_grpo, grpo

Weights = Callable[[Tensor, int], Tensor]

LOSSES: dict[str, Weights] = {
    "grpo": grpo.weights,
    "bnpo": bnpo.weights,
    "dr_grpo": dr_grpo.weights,
    "dapo": dapo.weights,
}


def token_weights(loss_type: str, lengths: Tensor, max_completion_length: int) -> Tensor:
    """Weight [R] of each token of each completion, from token counts [R] and the length limit in tokens."""
    return LOSSES[loss_type](lengths, max_completion_length)
