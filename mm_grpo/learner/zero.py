"""The optimizer of several processes: DeepSpeed's ZeRO stages 1 and 2, behind the interface of `Optimizer`.

Every process runs its own packs; gradients add up over all of them, and each process keeps the fp32
weights and running means of its share of the parameters (and at stage 2 of the gradients).

Accumulation is ours. DeepSpeed's own stays at 1, which alone would make each backward an update's last,
keep its gradient and drop those before it; so the boundary is set by hand before every backward, and
counted: `UpdateRecord.boundaries` other than 1 is stopped by the guard `update_happens`.

Stage 0 is not here: DeepSpeed's refuses fp32 sums of bf16 gradients, and `Optimizer` has them. Nor is
stage 3, which shares out the weights themselves: a rollout engine in this process needs them whole.
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
from mm_grpo.errors import ConfigError
from mm_grpo.learner import optimizer as single
from mm_grpo.learner.distributed import Ranks, open_group_alone, use_deepspeed
from mm_grpo.learner.optimizer import MOMENTS, Fragment, probe, stands_for
from mm_grpo.types import UpdateRecord

BUCKET = 200_000_000
"""Elements that are reduced or gathered at once."""


class ZeroOptimizer:
    """AdamW over the trainable parameters of `module`, its state shared out over `ranks`."""

    def __init__(self, module: nn.Module, config: OptimConfig, total_updates: int, ranks: Ranks) -> None:
        self.config, self.total, self.ranks = config, total_updates, ranks
        self.updates = 0
        self.boundaries = 0
        self.named = single.trainable(module)
        params = list(self.named.values())
        dtype = _one_dtype(params)
        gpu = params[0].device.type == "cuda"
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed = use_deepspeed(gpu)
        os.environ.setdefault("LOCAL_RANK", "0")
        if ranks.world == 1:
            open_group_alone(gpu)
        # torch's own fused AdamW serves the offloaded state: DeepSpeed's would compile C++ at the first start
        options = {"fused": True} if config.offload_optimizer else {}
        self.adamw = single.adamw(list(params), config, **options)
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

    def step(self, live_tokens: int) -> UpdateRecord:
        rate = self.rate()
        for group in self.adamw.param_groups:
            group["lr"] = rate
        before = [part.clone() for part, _ in self._probes()]
        self.engine.step()
        changes = [(p - b).square().sum() * n for (p, n), b in zip(self._probes(), before, strict=True)]
        squares = float(torch.stack(changes).sum()) if changes else 0.0
        change = self.ranks.sum({"squares": squares}, "update norm")
        # without a boundary DeepSpeed made no norm; that is for the guard, and not an overflow
        norm = float(self.engine.get_global_grad_norm() or 0.0) if self.boundaries else 0.0
        return self._record(rate, norm, math.sqrt(change["squares"]), live_tokens, math.isfinite(norm))

    def skip(self) -> UpdateRecord:
        self.boundaries = 1
        return self._record(self.rate(), 0.0, 0.0, live_tokens=0, stepped=False)

    def rate(self) -> float:
        return single.schedule(self.config, self.updates, self.total)

    # state -----------------------------------------------------------------------------------

    @property
    def adam_steps(self) -> int:
        return single.adam_steps(self.adamw)

    def fragments(self) -> Iterator[Fragment]:
        for name, param in self.named.items():
            mapping: Any = param._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # no element of it is this process's
                continue
            place = mapping.hp_fragment_address
            (flat,) = self.adamw.param_groups[mapping.param_group_index]["params"]
            state = single.moments(self.adamw, flat)
            tensors = {key: state[key].narrow(0, place.start, place.numel) for key in MOMENTS}
            master = mapping.hp_fragment.detach()
            yield Fragment(name, mapping.lp_fragment_address.start, {"master": master, **tensors})

    def restored(self, updates: int, adam_steps: int) -> None:
        self.updates = updates
        single.set_adam_steps(self.adamw, adam_steps)
        self.engine.optimizer.update_lp_params()

    def _record(
        self, rate: float, norm: float, change: float, live_tokens: int, stepped: bool
    ) -> UpdateRecord:
        boundaries, self.boundaries = self.boundaries, 0
        self.updates += 1
        return UpdateRecord(
            learning_rate=rate,
            grad_norm=norm,
            update_norm=change,
            live_tokens=live_tokens,
            trainable_parameters=sum(p.numel() for p in self.named.values()),
            stepped=stepped,
            boundaries=boundaries,
        )

    def _probes(self) -> Iterator[tuple[Tensor, float]]:
        """The elements of this process's share that `Optimizer` would look at, and how many each stands for."""
        for param in self.named.values():
            mapping: Any = param._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                start = mapping.lp_fragment_address.start
                yield probe(mapping.hp_fragment.detach(), param.numel(), start), stands_for(param.numel())


def settings(config: OptimConfig, dtype: torch.dtype, gpu: bool, module: nn.Module) -> dict[str, Any]:
    """DeepSpeed's config. Batch sizes are formal: what a step holds is our own affair."""
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


def _one_dtype(params: list[nn.Parameter]) -> torch.dtype:
    dtypes = {p.dtype for p in params}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise ConfigError(
            f"the trainable parameters are {names}; ZeRO shares out those of one number format, float32 or bfloat16: "
            "load the model in one (model.dtype), or set optim.zero_stage=0"
        )
    return dtypes.pop()
