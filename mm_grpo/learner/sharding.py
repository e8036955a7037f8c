"""ZeRO stage 3: the language model's weights shared out over the processes, by torch's `fully_shard` (FSDP2).

Each layer, the embedding and the head are cut into rows. Each process holds an equal part of the rows, of their
gradients and of the optimizer's state. A layer is gathered when it runs, and freed after it. The vision tower and the
last norm stay whole in each process, because a pack of text does not run the tower.

A gathering waits for all processes. So in every pass each makes as many forwards, of the same layers in the same order:
a process with fewer packs runs dummies (`ForwardPass.even_packs`), and no prompt runs apart from its completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mm_grpo.config import GRPOConfig, OptimConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.model import resolve_device
from mm_grpo.learner.optimizer import BaseOptimizer, Optimizer
from mm_grpo.learner.shards import RANKS, is_sharded, shares_weights
from mm_grpo.processors.family import Family


def shard_models(models: Iterable[Any], family: Family, ranks: Ranks, device: str) -> None:
    """Share out the weights of `models` over `ranks`, in place, and move them to the config's `device`. Collective.

    None is left out, and a model that is there twice is sharded once. It goes a layer at a time, so a model in the
    host's memory is never whole on the device.
    """
    for model in models:
        if model is not None and not is_sharded(model):
            _shard(model, family, ranks, resolve_device(device))


def _shard(model: Any, family: Family, ranks: Ranks, device: torch.device) -> None:
    text: Any = family.language_model(model)
    root, embedding, head = family.backbone(model), model.get_input_embeddings(), family.head(model)
    tied = head.weight is embedding.weight
    units: list[nn.Module] = [*text.layers, embedding, *([] if tied else [head])]
    sharded = {id(p) for unit in units for p in unit.parameters()}  # references would keep them whole
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (ranks.world,)),
        # fp32 adapters stay fp32 beside a bf16 base
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        "ignored_params": {p for p in model.parameters() if id(p) not in sharded},
    }
    for unit in units:
        for tensor in (*unit.parameters(), *unit.buffers()):
            # a copy: to write into the pages of the model's file would bring all of it into memory
            tensor.data = tensor.data.to(device, copy=True)
        ranks.broadcast_tensors(unit.parameters())
        fully_shard(unit, **options)
    if tied:  # torch ties weights inside one unit alone
        head.weight = embedding.weight
    fully_shard(root, **options)  # without weights of its own
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    # by itself the first module that runs becomes the root, and the embedding may run before it
    fully_shard.state(root)._lazy_init()  # type: ignore[attr-defined]
    ranks.broadcast_tensors(p for p in model.to(device).parameters() if not isinstance(p, DTensor))
    setattr(model, RANKS, ranks)


class ShardedOptimizer(Optimizer):
    """Optimizer of a sharded model: it keeps the state of this process's rows, and of weights that are whole."""

    def __init__(self, module: nn.Module, config: OptimConfig, total_updates: int, ranks: Ranks) -> None:
        super().__init__(module, config, total_updates, ranks)
        self.is_whole = [not isinstance(p, DTensor) for p in self.named.values()]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        self._take_gradients()
        if last:
            pairs = zip(self.masters, self.is_whole, strict=True)
            self.ranks.all_reduce([self._gradient(master) for master, whole in pairs if whole])

    def _masters(self) -> Iterator[tuple[str, int, Tensor]]:
        for (name, start, master), whole in zip(super()._masters(), self.is_whole, strict=True):
            if self.ranks.first or not whole:  # counted once
                yield name, start, master

    def _over_processes(self, squares: Tensor) -> Tensor:
        total = self.ranks.sum({"squares": float(squares)}, "squares")
        return torch.tensor(total["squares"], dtype=torch.float64)

    def _norm(self) -> Tensor:
        gradients = [
            self._gradient(master)
            for master, whole in zip(self.masters, self.is_whole, strict=True)
            if self.ranks.first or not whole
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        return self._over_processes(norm.double().square()).sqrt().to(norm)


def optimizer_class(config: GRPOConfig, ranks: Ranks) -> type[BaseOptimizer]:
    """Return the class of the optimizer of `optim.zero_stage` for these processes."""
    if shares_weights(config, ranks):
        return ShardedOptimizer
    if config.optim.offload_optimizer or (ranks.world > 1 and config.optim.zero_stage > 0):
        from mm_grpo.learner.zero import ZeroOptimizer

        return ZeroOptimizer
    return Optimizer
