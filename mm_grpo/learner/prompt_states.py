"""Prompts that run apart from their completions: once a pass for a group that is spread over several packs.

A completion needs of its prompt, in each text layer, the keys and values of its tokens, or in a layer of linear
attention the state after them; and the last layer's state that predicts its first token. None of it depends on a
completion. So the prompt runs with the first of its group's packs, and every pack continues from the stored states.

With gradients a pack takes the states as leaves. The gradients of its backward are summed there in fp32. When the last
pack is done, one backward takes the sums through the prompt, its images included. This is exact: the chain rule, with
the sum over packs taken at the leaves. Until then the prompt's graph lives, so its tokens count in each of its packs
(`pack.plan`). Gradient checkpointing does not reduce

    keys and values    2 layers P heads width numbers for keys and values, and as many for the sums of gradients in fp32

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
    """Place of a pack in the backward through a prompt after all its packs."""

    prompt: Prompt


@dataclass
class PromptState:
    """Stored states of a prompt of P tokens."""

    length: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By the layer's number, keys and values [1, h, P, d]; in linear attention the state after the prompt
    [1, h, dk, dv] and the convolution's last inputs [1, taps - 1, channels]."""
    last: Tensor = field(default_factory=lambda: torch.empty(0))
    """Last hidden state [1, D]."""

    def keep(self, layer: int, pair: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Store a layer's pair of states; a checkpointed layer that runs once more changes nothing."""
        if layer not in self.layers:
            self.layers[layer] = pair()

    def tensors(self) -> list[Tensor]:
        return [*(t for pair in self.layers.values() for t in pair), self.last]


class PromptStates:
    """States of the prompts that several packs of one pass continue from; `packs` are the prompts of each pack."""

    def __init__(self, packs: Iterable[Sequence[Prompt]]) -> None:
        self.ran: list[Prompt] = []
        """Prompts that were run, in order."""
        self._packs_left = Counter(id(p) for prompts in packs for p in prompts)
        self._states: dict[int, PromptState] = {}
        self._sums: dict[int, list[Tensor | None]] = {}

    def of(self, prompts: Sequence[Prompt], run: Callable[[Prompt], PromptState]) -> list[PromptState]:
        """Return the states of a pack's `prompts`, in order, as leaves if gradients are on; `run` makes new ones."""
        for prompt in prompts:
            if id(prompt) not in self._states:
                self._states[id(prompt)] = run(prompt)
                self.ran.append(prompt)
        states = [self._leaves(prompt) for prompt in prompts]
        self._packs_left.subtract(map(id, prompts))
        if not torch.is_grad_enabled():
            for end in self.ended(prompts):
                del self._states[id(end.prompt)]
        return states

    def ended(self, prompts: Iterable[Prompt]) -> list[PromptEnd]:
        """Return the `prompts` of a pack that no further pack continues from, each once, to run their backward."""
        return [PromptEnd(p) for p in {id(p): p for p in prompts}.values() if self._packs_left[id(p)] == 0]

    def joined(self, prompt: Prompt, head: Tensor | None) -> Tensor:
        """Return 0; its backward takes the summed gradients of the packs through the prompt, and 0 to the `head`."""
        state, sums = self._states.pop(id(prompt)), self._sums.pop(id(prompt))
        extra = [] if head is None else [head]
        ends: Tensor = _InjectGradients.apply([*sums, *(None for _ in extra)], *state.tensors(), *extra)  # type: ignore[no-untyped-call]
        return ends

    def _leaves(self, prompt: Prompt) -> PromptState:
        state = self._states[id(prompt)]
        if not torch.is_grad_enabled():
            return state
        tensors = state.tensors()
        sums = self._sums.setdefault(id(prompt), [None] * len(tensors))
        leaves = iter(
            [summed_leaf(t, sums, index) if t.requires_grad else t for index, t in enumerate(tensors)]
        )
        layers = {layer: (next(leaves), next(leaves)) for layer in state.layers}
        return PromptState(state.length, layers, next(leaves))


@dataclass(frozen=True)
class Prefixes:
    """States of the prompts of a pack that run apart."""

    states: Sequence[PromptState]
    """Row by row."""
    rows: Sequence[int]
    """Count of prompts of each row."""
    width: int
    """K, tokens of a row's prompts with their padding."""

    def pairs(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return the state of each prompt in a layer."""
        return [state.layers[layer] for state in self.states]

    def before(self, layer: int, side: int, x: Tensor) -> Tensor:
        """Put the prompts' keys (`side` 0) or values (1) before the pack's `x`: [B, h, N, d] to [B, h, K + N, d]."""
        return torch.cat([self._rows([pair[side] for pair in self.pairs(layer)], x), x], 2)

    def _rows(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        rows, start = list[Tensor](), 0
        for count in self.rows:
            pieces = [*parts[start : start + count], x.new_zeros(1, x.shape[1], 0, x.shape[3])]
            start += count
            row = torch.cat(pieces, 2)
            rows.append(pad(row, (0, 0, 0, self.width - row.shape[2])))
        return torch.cat(rows)


def summed_leaf(tensor: Tensor, sums: list[Tensor | None], index: int) -> Tensor:
    """Return `tensor` as a leaf; the gradients of its backwards are summed in fp32 at `sums[index]`."""

    def move_gradient(leaf: Tensor) -> None:
        grad, total = leaf.grad, sums[index]
        leaf.grad = None
        if grad is not None:
            sums[index] = grad.float() if total is None else total.add_(grad)

    leaf = tensor.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(move_gradient)
    return leaf


class _InjectGradients(torch.autograd.Function):
    """Return 0; on backward hand the stored gradients to the tensors."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.like = [(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # the gradient of the result is ignored: the stored ones were scaled when they were made
        stored, ctx.gradients = ctx.gradients, []
        gradients: list[Tensor | None] = []
        for number, (shape, dtype, device, requires_grad) in enumerate(ctx.like):
            gradient, stored[number] = stored[number], None  # freed one by one
            zeros = None
            if requires_grad and gradient is None:
                zeros = torch.zeros(shape, dtype=dtype, device=device)
            gradients.append(zeros if gradient is None else gradient.to(dtype))
        return None, *gradients
