"""Prompts that are run apart from their completions: once a pass for a group that is spread over several packs.

What a completion takes of its prompt is, of each text layer, the keys and values of the prompt's tokens, or in a layer
of linear attention the state after them, and of the last layer the state that predicts its first token. None of it
depends on a completion. So the prompt is run when the first of its group's packs comes, and every pack goes on from
what was kept.

With gradients a pack takes what was kept as leaves. The gradients that its backward leaves there are summed in fp32,
and when the last pack is done one backward takes them through the prompt, its images included. This is exact: the
chain rule, with the sum over packs taken at the leaves. Until then the prompt's graph lives, which is why its tokens
count in each of its packs (`pack.plan`), and besides

    keys and values    2 layers P heads width numbers, those of keys and values, with their gradients' sums in fp32

which gradient checkpointing does not make smaller.

The backward through a prompt reaches every parameter, in a pack's order (see forward.py): for ZeRO-2 it is one more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from mm_grpo.types import Prompt


@dataclass(frozen=True)
class PromptEnd:
    """Stands for a pack in the backward through a prompt whose packs are all done."""

    prompt: Prompt


@dataclass
class PromptState:
    """Kept tensors of a prompt of P tokens.

    `layers` are, by the layer's number, its keys and values [1, h, P, d], or of linear attention the state after the
    prompt [1, h, dk, dv] and the convolution's last inputs [1, taps - 1, channels]; `last` [1, D] is the last hidden
    state.
    """

    length: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    last: Tensor = field(default_factory=lambda: torch.empty(0))

    def keep(self, layer: int, pair: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Keep what a layer hands on; a checkpointed layer that runs once more changes nothing."""
        if layer not in self.layers:
            self.layers[layer] = pair()

    def tensors(self) -> list[Tensor]:
        return [*(t for pair in self.layers.values() for t in pair), self.last]


class PromptStates:
    """The prompts of one pass that several packs go on from. `packs` are the prompts that each pack goes on from.

    `ran` are those that were run, in order.
    """

    def __init__(self, packs: Iterable[Sequence[Prompt]]) -> None:
        self.ran: list[Prompt] = []
        self._left = Counter(id(p) for prompts in packs for p in prompts)
        self._kept: dict[int, PromptState] = {}
        self._sums: dict[int, list[Tensor | None]] = {}

    def of(self, prompts: Sequence[Prompt], run: Callable[[Prompt], PromptState]) -> list[PromptState]:
        """The states of a pack's `prompts`, in order, as leaves where gradients are wanted; `run` makes new ones."""
        for prompt in prompts:
            if id(prompt) not in self._kept:
                self._kept[id(prompt)] = run(prompt)
                self.ran.append(prompt)
        found = [self._leaves(prompt) for prompt in prompts]
        self._left.subtract(map(id, prompts))
        if not torch.is_grad_enabled():
            for end in self.ended(prompts):
                del self._kept[id(end.prompt)]
        return found

    def ended(self, prompts: Iterable[Prompt]) -> list[PromptEnd]:
        """Return those of a pack's `prompts` that no further pack goes on from, each once, for their backward."""
        return [PromptEnd(p) for p in {id(p): p for p in prompts}.values() if self._left[id(p)] == 0]

    def joined(self, prompt: Prompt, head: Tensor | None) -> Tensor:
        """A scalar, whose backward takes the sums of the packs' gradients through the prompt, and 0 to the `head`."""
        state, sums = self._kept.pop(id(prompt)), self._sums.pop(id(prompt))
        extra = [] if head is None else [head]
        ends: Tensor = _Ends.apply([*sums, *(None for _ in extra)], *state.tensors(), *extra)  # type: ignore[no-untyped-call]
        return ends

    def _leaves(self, prompt: Prompt) -> PromptState:
        kept = self._kept[id(prompt)]
        if not torch.is_grad_enabled():
            return kept
        tensors = kept.tensors()
        sums = self._sums.setdefault(id(prompt), [None] * len(tensors))
        leaves = iter(
            [summed_leaf(t, sums, place) if t.requires_grad else t for place, t in enumerate(tensors)]
        )
        layers = {layer: (next(leaves), next(leaves)) for layer in kept.layers}
        return PromptState(kept.length, layers, next(leaves))


@dataclass(frozen=True)
class Prefixes:
    """States of prompts that are run apart, for a pack's layers: `states` row by row, of `rows` how many each.

    `width` is K, that of the prompts of a row with what pads them.
    """

    states: Sequence[PromptState]
    rows: Sequence[int]
    width: int

    def pairs(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return the state of each prompt in a layer."""
        return [state.layers[layer] for state in self.states]

    def before(self, layer: int, side: int, x: Tensor) -> Tensor:
        """The keys (`side` 0) or values (1) of the prompts before those of a pack: [B, h, N, d] to [B, h, K + N, d]."""
        return torch.cat([self._rows([pair[side] for pair in self.pairs(layer)], x), x], 2)

    def _rows(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        rows, start = list[Tensor](), 0
        for count in self.rows:
            own = [*parts[start : start + count], x.new_zeros(1, x.shape[1], 0, x.shape[3])]
            start += count
            row = torch.cat(own, 2)
            rows.append(pad(row, (0, 0, 0, self.width - row.shape[2])))
        return torch.cat(rows)


def summed_leaf(tensor: Tensor, sums: list[Tensor | None], place: int) -> Tensor:
    """`tensor` as a leaf, the gradients of whose backwards are summed in fp32 at that place of `sums`."""

    def move_gradient(leaf: Tensor) -> None:
        grad, total = leaf.grad, sums[place]
        leaf.grad = None
        if grad is not None:
            sums[place] = grad.float() if total is None else total.add_(grad)

    leaf = tensor.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(move_gradient)
    return leaf


class _Ends(torch.autograd.Function):
    """0, whose gradients are given. That of the result is not looked at: they were scaled where they were made."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.like = [(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []
        found: list[Tensor | None] = []
        for number, (shape, dtype, device, wanted) in enumerate(ctx.like):
            given, gradients[number] = gradients[number], None  # freed one by one
            zeros = torch.zeros(shape, dtype=dtype, device=device) if wanted and given is None else None
            found.append(zeros if given is None else given.to(dtype))
        return None, *found
