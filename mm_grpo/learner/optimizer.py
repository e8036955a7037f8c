"""One optimizer update: AdamW over fp32 weights, a schedule, clipping by norm.

Parameters in bfloat16 keep fp32 master copies here: an update of 1e-6 is lost when it is added to a
bfloat16 weight of ordinary size (8 bits of mantissa), and nobody would be told.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mm_grpo.config import OptimConfig
from mm_grpo.types import UpdateRecord

PROBE = 65536
"""Elements of each tensor, evenly spread, that are compared before and after an update: all of a small
model, and enough to tell a zero from a real update of a large one."""


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


class Optimizer:
    """AdamW over the trainable parameters of `module`, which may be bfloat16 or float32."""

    def __init__(self, module: nn.Module, config: OptimConfig, total_updates: int) -> None:
        self.config = config
        self.total = total_updates
        self.updates = 0
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        decay = [m for m in self.masters if m.ndim >= 2]
        plain = [m for m in self.masters if m.ndim < 2]  # norms and biases are not decayed
        self.adamw = torch.optim.AdamW(
            [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )

    def step(self, live_tokens: int) -> UpdateRecord:
        """Clip, update and clear the gradients that backward left on the parameters.

        A gradient that is not finite is held back and recorded as such.
        """
        rate = self.rate()
        for master, param in zip(self.masters, self.params, strict=True):
            if master is not param:
                master.grad = None if param.grad is None else param.grad.float()
        grads = [m.grad for m in self.masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        finite = bool(norm.isfinite())
        if self.config.max_grad_norm > 0 and finite:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        before = [_probe(m).clone() for m in self.masters]
        if finite:
            self.adamw.step()
        changes = [(_probe(m) - b).square().sum() for m, b in zip(self.masters, before, strict=True)]
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
        """An update without work: the schedule moves on, the weights do not."""
        rate = self.rate()
        self._clear()
        self.updates += 1
        count = sum(p.numel() for p in self.params)
        return UpdateRecord(rate, 0.0, 0.0, live_tokens=0, trainable_parameters=count, stepped=False)

    def rate(self) -> float:
        """The learning rate of the next update."""
        return schedule(self.config, self.updates, self.total)

    def _clear(self) -> None:
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.grad = None
                if master is not param:
                    master.grad = None
                    param.copy_(master)


def _probe(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, math.ceil(flat.numel() / PROBE))]
