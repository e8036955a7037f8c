"""Weights of which each process holds some rows (`optim.zero_stage: 3`, see sharding.py), and all others."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks

RANKS = "_mm_grpo_ranks"
"""The attribute of a sharded model that holds its processes."""


def shares_weights(config: GRPOConfig, ranks: Ranks) -> bool:
    """Return True if a run of these processes shards its model."""
    return config.optim.zero_stage == 3 and ranks.world > 1


def gathered(weight: Tensor) -> Tensor:
    """Return a weight whole; its gradient is the sum over the processes. Collective if it is sharded."""
    return weight.full_tensor(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight


def local_part(weight: Tensor) -> Tensor:
    """Return the rows of a sharded weight that this process holds, without their graph; any other weight itself."""
    return weight.to_local().detach() if isinstance(weight, DTensor) else weight


def start_of(weight: Tensor) -> int:
    """Return the place in the flattened weight at which `local_part` begins."""
    if not isinstance(weight, DTensor):
        return 0
    rows, mesh = weight.shape[0], weight.device_mesh
    first = min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))
    return first * weight.shape[1:].numel()


def is_sharded(model: Any) -> bool:
    """Return True for a model of `shard_model`."""
    return hasattr(model, RANKS)


def missing_forwards(model: Any, count: int) -> int:
    """Return how many forwards more than `count` another process makes; 0 if the weights are whole. Collective."""
    ranks: Ranks | None = getattr(model, RANKS, None)
    return 0 if ranks is None else ranks.max(count, "forwards") - count
