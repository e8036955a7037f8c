"""A pass over packs with gradients, as a learner's update makes it, and counters of what a model was given to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.forward_pass import ForwardPass
from mm_grpo.learner.pack import Item, Pack
from mm_grpo.learner.step_report import PackStatistics
from mm_grpo.processors.base import Processor

Plan = Sequence[Sequence[Sequence[Item]]]
Loss = Callable[[Pack, Tensor, Tensor], Tensor]
"""Of a pack with its log-probs [M] and entropies [M]."""


def forward_of(model: Any, processor: Processor, temperature: float = 1.0) -> PackForward:
    """The module over `model`, as a learner wraps it."""
    values = {"model": {"path": "x"}, "rollout": {"temperature": temperature}}
    return PackForward(model, processor, GRPOConfig.from_dict(values))


def orders_of(model: Any) -> list[str]:
    """A list to which each of the model's parameters adds its name when its gradient is ready."""
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    return order


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradient of each parameter, zeros if it has none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def backward_of(module: PackForward, planned: Plan, media: frozenset[int], loss: Loss) -> PackStatistics:
    """Forward and backward of every pack, and of what they share; returns what was run."""
    work = PackStatistics()
    with ForwardPass(module, planned, media, work) as whole:
        for pack in whole.packs():
            loss(pack, *module(pack)[:2]).backward()
            for end in whole.ended(pack):
                module(end)[0].backward()
    return work


@dataclass
class Seen:
    """What a model was given: `tokens` through its embedding and `pixels` (how many) through its tower."""

    tokens: list[int] = field(default_factory=list)
    pixels: list[int] = field(default_factory=list)

    def runs(self, prompt: Sequence[int]) -> int:
        """How often a prompt's tokens were run."""
        text, part = (",".join(map(str, ids)) for ids in (self.tokens, prompt))
        return f",{text},".count(f",{part},")


@contextmanager
def counted(model: Any) -> Iterator[Seen]:
    """Counts, below everything of ours, what goes through the embedding and the tower."""
    seen, backbone = Seen(), type(model.model)
    features = backbone.get_image_features

    def noted(self: Any, pixel_values: Tensor, *args: Any, **options: Any) -> Any:
        if pixel_values.min() < pixel_values.max():  # no blank image
            seen.pixels.append(pixel_values.numel())
        return features(self, pixel_values, *args, **options)

    handle = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.tokens.extend([*inputs[0].flatten().tolist(), -1])
    )
    backbone.get_image_features = noted
    try:
        yield seen
    finally:
        backbone.get_image_features = features
        handle.remove()
