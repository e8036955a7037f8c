"""Optimizer updates: AdamW over fp32 weights, a schedule, clipping by norm.

Parameters in bfloat16 keep fp32 master copies: an update of 1e-6 is lost without a trace when it is added to a bfloat16
weight of ordinary size (8 bits of mantissa). For the same reason their gradients are summed over packs in fp32.

`BaseOptimizer` is the learner's interface, with the code that both optimizers share. `Optimizer` keeps the whole state
in each process: it serves one process, and several at `optim.zero_stage` 0, which add up their gradients.
`ZeroOptimizer` (zero.py) shards the state over the processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.config import OptimConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.shards import local_part, start_of
from mm_grpo.types import UpdateRecord

SAMPLE_SIZE = 65536
"""Elements of each tensor, evenly spaced, from which the norm of an update is estimated."""
MOMENTS = ("exp_avg", "exp_avg_sq")

HOOK = "_mm_grpo_hook"
"""The attribute of a parameter that holds the hook of its optimizer."""


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter's optimizer state that this process holds.

    `tensors` are flat fp32 views [n] of the master weight (`master`) and of AdamW's running means
    (`exp_avg`, `exp_avg_sq`), elements `start` to `start + n` of the flattened parameter `name`.
    """

    name: str
    start: int
    tensors: Mapping[str, Tensor]
    repeated: bool = False
    """True if every process holds the same part; the first one writes it."""


class BaseOptimizer(ABC):
    """AdamW over the trainable parameters of `module`. A subclass decides which process holds which part of the state.

    `updates` counts updates that were made or skipped: it is the position in the schedule of `total_updates`.
    """

    forward: Any
    """Runs the module with gradients; set by a subclass."""
    adamw: torch.optim.Optimizer
    reads_order: bool = False
    """True when every backward has to make every gradient, in one order (see forward.py)."""

    def __init__(self, module: nn.Module, config: OptimConfig, total_updates: int, ranks: Ranks) -> None:
        self.config, self.total, self.ranks = config, total_updates, ranks
        self.updates = 0
        self.named = trainable(module)

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a pack's gradients; `last` marks the last pack of the update."""

    def apply(self, live_tokens: int) -> UpdateRecord:
        """Clip, update and clear the gradients. A gradient that is not finite changes no weight, and is recorded."""
        for group in self.adamw.param_groups:
            group["lr"] = self.rate()
        before = [sample.clone() for sample, _ in self._samples()]
        norm = self._clip_and_update()
        changes = [(s - b).square().sum() * n for (s, n), b in zip(self._samples(), before, strict=True)]
        squares = torch.stack(changes).sum() if changes else torch.zeros(())
        change = float(self._over_processes(squares).sqrt())
        return self._record(
            norm, change, live_tokens, stepped=math.isfinite(norm), boundaries=self._boundaries()
        )

    def skip(self) -> UpdateRecord:
        """Record an update without work: the schedule advances, the weights stay."""
        return self._record(0.0, 0.0, live_tokens=0, stepped=False)

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return schedule(self.config, self.updates, self.total)

    # state -----------------------------------------------------------------------------------

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """Yield this process's share of the state; a checkpoint is read from it, or written into it."""

    @property
    def adam_steps(self) -> int:
        """Return the count of updates that AdamW applied, without skipped ones; its bias correction depends on it."""
        return max((int(state["step"]) for state in self.adamw.state.values() if "step" in state), default=0)

    def resume_at(self, updates: int, adam_steps: int) -> None:
        """Continue after the fragments were filled from a checkpoint: `updates` made, `adam_steps` applied."""
        self.updates = updates
        for state in self.adamw.state.values():
            if "step" in state:
                state["step"].fill_(adam_steps)
        self._masters_to_parameters()

    # for subclasses --------------------------------------------------------------------------

    @abstractmethod
    def _clip_and_update(self) -> float:
        """Clip, apply and clear the gradients, copy masters to parameters; return the norm before clipping."""

    @abstractmethod
    def _masters(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the local master weights: the parameter's name, the start of the fragment, its elements [n]."""

    @abstractmethod
    def _masters_to_parameters(self) -> None:
        """Copy the master weights to the parameters that the module runs with."""

    def _over_processes(self, squares: Tensor) -> Tensor:
        """Return the squared norm of the update from the local masters' squares; here this process holds all."""
        return squares

    def _boundaries(self) -> int:
        """Return the backward passes of this update that closed an accumulation (`UpdateRecord.boundaries`)."""
        return 1

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        """Return AdamW's state of a tensor; make it if no update has."""
        state: dict[str, Tensor] = self.adamw.state[master]
        if not state:
            # a fused AdamW counts on the device of its weights, others on the host
            fused = bool(self.adamw.defaults.get("fused"))
            state["step"] = torch.zeros((), device=master.device if fused else None)
            state.update({key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS})
        return state

    def _record(
        self, norm: float, change: float, live_tokens: int, stepped: bool, boundaries: int = 1
    ) -> UpdateRecord:
        rate = self.rate()
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

    def _samples(self) -> Iterator[tuple[Tensor, float]]:
        """Yield samples of the local masters, and how many elements each sampled one represents."""
        for name, start, master in self._masters():
            size = self.named[name].numel()
            stride = max(1, math.ceil(size / SAMPLE_SIZE))
            yield master[-start % stride :: stride], size / max(1, math.ceil(size / stride))


class Optimizer(BaseOptimizer):
    """Optimizer with its whole state in each process. Float32 parameters are their own masters."""

    def __init__(self, module: nn.Module, config: OptimConfig, total_updates: int, ranks: Ranks) -> None:
        super().__init__(module, config, total_updates, ranks)
        self.forward = module
        self.params = [local_part(p) for p in self.named.values()]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        self.adamw = adamw(self.masters, config)
        for master, param in zip(self.masters, self.named.values(), strict=True):
            old_hook = getattr(param, HOOK, None)
            # an earlier optimizer of the same model would take the gradients
            if old_hook is not None:
                old_hook.remove()
            # a hook takes each gradient as soon as it is complete, so that few bf16 gradients are held at once
            if master is not param:
                hook = param.register_post_accumulate_grad_hook(partial(accumulate_into_master, master))
                setattr(param, HOOK, hook)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        if last:
            self.ranks.all_reduce([self._gradient(m) for m in self.masters])

    def skip(self) -> UpdateRecord:
        self._clear()
        return super().skip()

    def fragments(self) -> Iterator[Fragment]:
        for (name, param), master in zip(self.named.items(), self.masters, strict=True):
            state = self._moments(master)
            tensors = {"master": master, **{key: state[key] for key in MOMENTS}}
            flat = {key: t.detach().view(-1) for key, t in tensors.items()}
            yield Fragment(name, start_of(param), flat, repeated=local_part(param) is param)

    def _clip_and_update(self) -> float:
        self._take_gradients()
        norm = self._norm()
        if norm.isfinite():
            if self.config.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
            self.adamw.step()
        self._clear()
        return float(norm)

    def _take_gradients(self) -> None:
        """Move the gradients of parameters that are not their own masters to those."""
        for master, param in zip(self.masters, self.named.values(), strict=True):
            if master is not param:
                accumulate_into_master(master, param)

    def _norm(self) -> Tensor:
        """Return the 2-norm over the gradients of all masters."""
        return torch.nn.utils.get_total_norm([self._gradient(m) for m in self.masters])

    def _gradient(self, master: Tensor) -> Tensor:
        """Return a master's gradient; 0 if no pack reached it, so that processes can add theirs."""
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def _masters(self) -> Iterator[tuple[str, int, Tensor]]:
        for (name, param), master in zip(self.named.items(), self.masters, strict=True):
            yield name, start_of(param), master.detach().flatten()

    def _masters_to_parameters(self) -> None:
        self._clear()

    def _clear(self) -> None:
        """Drop the gradients, and copy masters to bf16 parameters."""
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.grad = None
                if master is not param:
                    master.grad = None
                    param.copy_(master)


def schedule(config: OptimConfig, update: int, total: int) -> float:
    """Return the learning rate of the `update`-th (from 0) of `total` updates, as transformers' schedules do."""
    warmup = min(config.warmup_steps, total)
    if update < warmup:
        return config.peak_rate() * update / warmup
    progress = (update - warmup) / max(1, total - warmup)
    factor = {
        "constant": 1.0,
        "linear": max(0.0, 1.0 - progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))),
    }[config.lr_scheduler_type]
    return config.peak_rate() * factor


def adamw(params: list[Tensor], config: OptimConfig, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW over `params`: matrices decay, norms and biases do not."""
    # unfused, it would copy all weights on a GPU
    if any(p.device.type == "cuda" for p in params):
        options.setdefault("fused", True)
    decay = [p for p in params if p.ndim >= 2]
    plain = [p for p in params if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=config.peak_rate(),
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        **options,
    )


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by their names in the wrapped model."""
    return {n.removeprefix("model."): p for n, p in module.named_parameters() if p.requires_grad}


def accumulate_into_master(master: Tensor, param: Tensor) -> None:
    """Add a parameter's gradient to its fp32 master's, and free it."""
    grad = param.grad
    if grad is not None:
        grad = local_part(grad)
        master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
        param.grad = None
