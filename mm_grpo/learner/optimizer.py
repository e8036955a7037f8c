"""One optimizer update: AdamW over fp32 weights, a schedule, clipping by norm.

Parameters in bfloat16 keep fp32 master copies here: an update of 1e-6 is lost when it is added to a
bfloat16 weight of ordinary size (8 bits of mantissa), and nobody would be told. Their gradients are
summed over packs in fp32 too, for the same reason.

`Optimizer` holds everything in each process: it serves one process, and several at `optim.zero_stage` 0,
which add up their gradients. `zero.py` has the one that shares the state out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mm_grpo.config import OptimConfig
from mm_grpo.learner.distributed import Ranks
from mm_grpo.types import UpdateRecord

PROBE = 65536
"""Elements of each tensor, evenly spread, that are compared before and after an update: all of a small
tensor, and enough of a large one to tell a zero from a real update and to estimate its norm."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter's optimizer state that this process holds.

    `tensors` are flat fp32 views [n] of the master weight (`master`) and of AdamW's running means
    (`exp_avg`, `exp_avg_sq`), elements `start` to `start + n` of the flattened parameter `name`.
    """

    name: str
    start: int
    tensors: Mapping[str, Tensor]


class AnyOptimizer(Protocol):
    """What the learner asks of an optimizer. `forward` runs the module where gradients are wanted."""

    forward: Any
    updates: int

    @property
    def adam_steps(self) -> int:
        """Updates that were applied: all but those skipped or held back."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a pack's gradients; `last` says that the update's last pack is this one."""
        ...

    def step(self, live_tokens: int) -> UpdateRecord:
        """Clip, update and clear the gradients. One that is not finite is held back and recorded as such."""
        ...

    def skip(self) -> UpdateRecord:
        """An update without work: the schedule moves on, the weights do not."""
        ...

    def rate(self) -> float:
        """The learning rate of the next update."""
        ...

    def fragments(self) -> Iterator[Fragment]:
        """This process's share of the state, to read for a checkpoint or to write into from one."""
        ...

    def restored(self, updates: int, adam_steps: int) -> None:
        """The fragments were written into: take up from there, `updates` made and `adam_steps` applied."""
        ...


def schedule(config: OptimConfig, update: int, total: int) -> float:
    """Learning rate of the `update`-th (from 0) of `total` updates.

    Linear warm-up from 0 over `warmup_steps` updates, then constant, or down to 0 in a straight line
    (`linear`) or half a cosine (`cosine`), as transformers' schedules.
    """
    if update < config.warmup_steps:
        return config.learning_rate * update / config.warmup_steps
    progress = (update - config.warmup_steps) / max(1, total - config.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": max(0.0, 1.0 - progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))),
    }[config.lr_scheduler_type]
    return config.learning_rate * factor


def adamw(params: list[Tensor], config: OptimConfig, **options: Any) -> torch.optim.Optimizer:
    """AdamW over `params` in two groups: matrices decay, norms and biases do not."""
    decay = [p for p in params if p.ndim >= 2]
    plain = [p for p in params if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        **options,
    )


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by their names in the wrapped model."""
    named = ((n.removeprefix("model."), p) for n, p in module.named_parameters() if p.requires_grad)
    return dict(named)


class Optimizer:
    """AdamW over the trainable parameters of `module`, which may be bfloat16 or float32."""

    def __init__(
        self, module: nn.Module, config: OptimConfig, total_updates: int, ranks: Ranks | None = None
    ) -> None:
        self.forward, self.config, self.total = module, config, total_updates
        self.ranks = ranks or Ranks()
        self.updates = 0
        named = trainable(module)
        self.names, self.params = list(named), list(named.values())
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        self.adamw = adamw(self.masters, config)
        for master, param in zip(self.masters, self.params, strict=True):
            if master is not param:  # as soon as it is complete, so that few bf16 gradients are held at once
                param.register_post_accumulate_grad_hook(partial(_take, master))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        if last:
            self.ranks.sum_tensors([self._gradient(m) for m in self.masters])

    def step(self, live_tokens: int) -> UpdateRecord:
        rate = self.rate()
        for master, param in zip(self.masters, self.params, strict=True):
            if master is not param and param.grad is not None:
                _take(master, param)
        norm = torch.nn.utils.get_total_norm([self._gradient(m) for m in self.masters])
        finite = bool(norm.isfinite())
        if self.config.max_grad_norm > 0 and finite:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        before = [probe(m.detach().flatten(), m.numel()).clone() for m in self.masters]
        if finite:
            self.adamw.step()
        changes = [
            (probe(m.detach().flatten(), m.numel()) - b).square().sum() * stands_for(m.numel())
            for m, b in zip(self.masters, before, strict=True)
        ]
        self._clear()
        self.updates += 1
        return UpdateRecord(
            learning_rate=rate,
            grad_norm=float(norm),
            update_norm=float(torch.stack(changes).sum().sqrt()) if changes else 0.0,
            live_tokens=live_tokens,
            trainable_parameters=sum(p.numel() for p in self.params),
            stepped=finite,
        )

    def skip(self) -> UpdateRecord:
        rate = self.rate()
        self._clear()
        self.updates += 1
        count = sum(p.numel() for p in self.params)
        return UpdateRecord(rate, 0.0, 0.0, live_tokens=0, trainable_parameters=count, stepped=False)

    def rate(self) -> float:
        return schedule(self.config, self.updates, self.total)

    # state -----------------------------------------------------------------------------------

    @property
    def adam_steps(self) -> int:
        return adam_steps(self.adamw)

    def fragments(self) -> Iterator[Fragment]:
        for name, master in zip(self.names, self.masters, strict=True):
            state = moments(self.adamw, master)
            tensors = {"master": master, **{key: state[key] for key in MOMENTS}}
            yield Fragment(name, 0, {key: t.detach().view(-1) for key, t in tensors.items()})

    def restored(self, updates: int, adam_steps: int) -> None:
        self.updates = updates
        set_adam_steps(self.adamw, adam_steps)
        self._clear()

    def _gradient(self, master: Tensor) -> Tensor:
        """A parameter that no pack reached has gradient 0, with one process as with several."""
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def _clear(self) -> None:
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.grad = None
                if master is not param:
                    master.grad = None
                    param.copy_(master)


def probe(flat: Tensor, size: int, start: int = 0) -> Tensor:
    """Evenly spread elements of a flat tensor, which is the part from `start` of one with `size` elements."""
    stride = _stride(size)
    return flat[-start % stride :: stride]


def stands_for(size: int) -> float:
    """How many elements of a tensor of `size` each one of its probe speaks for."""
    return size / max(1, math.ceil(size / _stride(size)))


def _stride(size: int) -> int:
    return max(1, math.ceil(size / PROBE))


def moments(adamw: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """AdamW's state of one tensor, made if no step has made it yet."""
    state: dict[str, Tensor] = adamw.state[master]
    if not state:
        state["step"] = torch.zeros(())
        state.update({key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS})
    return state


def adam_steps(adamw: torch.optim.Optimizer) -> int:
    """Updates that AdamW applied; its bias correction goes by them."""
    return max((int(state["step"]) for state in adamw.state.values() if "step" in state), default=0)


def set_adam_steps(adamw: torch.optim.Optimizer, steps: int) -> None:
    for state in adamw.state.values():
        if "step" in state:
            state["step"].fill_(steps)


def _take(master: Tensor, param: Tensor) -> None:
    """Add a parameter's gradient to its fp32 master's, and let go of it."""
    grad = param.grad
    if grad is not None:
        master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
        param.grad = None
