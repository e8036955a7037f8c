"""The optimizer of several processes: DeepSpeed's ZeRO stages 1 and 2 as a `BaseOptimizer`.

Accumulation is ours. DeepSpeed's own stays at 1, which alone would make each backward an update's last, and drop the
gradients before it; so the boundary is set by hand before every backward, and counted (`UpdateRecord.boundaries`).

Stage 0 is not here: DeepSpeed's refuses fp32 sums of bf16 gradients, and `Optimizer` has them. Nor is stage 3
(sharding.py): DeepSpeed's compares the order of modules over processes, and waits for ever at a pack of text beside one
with images.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.config import OptimConfig
from mm_grpo.distributed.ranks import Ranks, open_group_alone, use_deepspeed
from mm_grpo.learner import optimizer
from mm_grpo.learner.optimizer import MOMENTS, BaseOptimizer, Fragment

BUCKET = 200_000_000
"""Elements that are reduced or gathered at once."""


class ZeroOptimizer(BaseOptimizer):
    """AdamW over the trainable parameters of `module`, its state sharded over `ranks`."""

    reads_order = True

    def __init__(self, module: nn.Module, config: OptimConfig, total_updates: int, ranks: Ranks) -> None:
        super().__init__(module, config, total_updates, ranks)
        self.boundaries = 0
        params = list(self.named.values())
        dtype, gpu = params[0].dtype, params[0].device.type == "cuda"
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed = use_deepspeed(gpu)
        os.environ.setdefault("LOCAL_RANK", "0")
        if ranks.world == 1:
            open_group_alone("nccl" if gpu else "gloo")
        # torch's own fused AdamW serves the offloaded state: DeepSpeed's would compile C++ at the first start
        options = {"fused": True} if config.offload_optimizer else {}
        self.adamw = optimizer.adamw(list(params), config, **options)
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=self.adamw, config=settings(config, dtype, gpu, module)
        )
        # an older DeepSpeed does not know how to add up, and takes the mean
        self.scale = float(ranks.world) if self.engine.gradient_average else 1.0
        self.forward = self.engine

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.scale)
        self.boundaries += bool(self.engine.is_gradient_accumulation_boundary())

    def fragments(self) -> Iterator[Fragment]:
        for name, mapping in self._mappings():
            place = mapping.hp_fragment_address
            (flat,) = self.adamw.param_groups[mapping.param_group_index]["params"]
            state = self._moments(flat)
            tensors = {key: state[key].narrow(0, place.start, place.numel) for key in MOMENTS}
            master = mapping.hp_fragment.detach()
            yield Fragment(name, mapping.lp_fragment_address.start, {"master": master, **tensors})

    def _clip_and_update(self) -> float:
        self.engine.step()
        # without a boundary DeepSpeed made no norm; the guard reports that, and it is not an overflow
        norm = float(self.engine.get_global_grad_norm() or 0.0) if self.boundaries else 0.0
        if not math.isfinite(norm):
            # Stage 2 sums bf16 gradients in fp32 buffers, and with offload it keeps these after an overflow (DeepSpeed
            # 0.19.8): the next update's gradients would be added to an infinity, and so on for ever.
            sums: dict[int, Any] = getattr(self.engine.optimizer, "averaged_gradients", {})
            sums.update(dict.fromkeys(sums))
        return norm

    def _masters(self) -> Iterator[tuple[str, int, Tensor]]:
        for name, mapping in self._mappings():
            yield name, mapping.lp_fragment_address.start, mapping.hp_fragment.detach()

    def _masters_to_parameters(self) -> None:
        self.engine.optimizer.update_lp_params()

    def _over_processes(self, squares: Tensor) -> Tensor:
        total = self.ranks.sum({"squares": float(squares)}, "update norm")
        return torch.tensor(total["squares"], dtype=torch.float64)

    def _boundaries(self) -> int:
        boundaries, self.boundaries = self.boundaries, 0
        return boundaries

    def _mappings(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of which this process holds elements, with DeepSpeed's addresses of the fragments."""
        for name, param in self.named.items():
            mapping: Any = param._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                yield name, mapping


def settings(config: OptimConfig, dtype: torch.dtype, gpu: bool, module: nn.Module) -> dict[str, Any]:
    """Return DeepSpeed's config. Batch sizes are formal, because the learner accumulates by itself."""
    largest = min(BUCKET, sum(p.numel() for p in module.parameters() if p.requires_grad))
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": gpu and config.zero_stage == 2,
        "reduce_bucket_size": largest,
        "allgather_bucket_size": largest + largest % 2,
    }
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": gpu}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": float(config.max_grad_norm),
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
