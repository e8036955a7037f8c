"""Vision towers as transformers has them, with two things done in fewer and faster calls; the result is the same.

Attention. A tower runs the patches of all images of a pack as one sequence, cut into stretches that attend within
themselves: images, or windows of 64 patches. Without flash-attn transformers calls sdpa once for every stretch,
thousands of times for a few large images, and asks the device for the lengths in each layer. Here
stretches of one length are a batch, and the lengths are asked for once a pass.

Patches. They come cut out already, and a convolution whose kernel is as large as its input is one matrix product.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "mm_grpo_stretches_flash"
"""With "flash" in it, for that is how transformers knows that a function takes the sequence whole, with its cuts."""


@dataclass(frozen=True)
class Stretches:
    """How a sequence of S patches is cut: `batches` are (how many, of which length), lengths as they come by.

    `order` [S] lists the patches batch by batch, `back` [S] undoes it; both are None where one length is all.
    """

    batches: tuple[tuple[int, int], ...]
    order: Tensor | None
    back: Tensor | None


def stretches_of(cuts: Tensor) -> Stretches:
    """The stretches between the places `cuts` [n + 1], which begin with 0 and end with S."""
    places: list[int] = cuts.tolist()
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(places):
        starts.setdefault(end - start, []).append(start)
    batches = tuple((len(own), length) for length, own in starts.items())
    if len(batches) == 1:
        return Stretches(batches, None, None)
    each = [(torch.tensor(own)[:, None] + torch.arange(length)).flatten() for length, own in starts.items()]
    order = torch.cat(each)
    return Stretches(batches, order.to(cuts.device), order.argsort().to(cuts.device))


def attend_by_stretches(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Queries, keys and values [1, H, S, d]; returns [1, S, H, d], as transformers asks."""
    if cu_seq_lens_q is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return whole
    cut = _kept(cu_seq_lens_q)
    inputs = [x[0].transpose(0, 1) for x in (query, key, value)]  # [S, H, d]
    if cut.order is not None:
        inputs = [x.index_select(0, cut.order) for x in inputs]
    outs, start = [], 0
    for count, length in cut.batches:
        own = slice(start, start + count * length)
        q, k, v = (x[own].unflatten(0, (count, length)).transpose(1, 2) for x in inputs)
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        start = own.stop
    joined = outs[0] if cut.back is None else torch.cat(outs).index_select(0, cut.back)
    return joined[None], None


AttentionInterface.register(NAME, attend_by_stretches)


class PatchProduct(nn.Conv3d):
    """A convolution over patches of the size of its kernel, [S, C, t, h, w] -> [S, D, 1, 1, 1]."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)
        made = torch.nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return made[:, :, None, None, None]


def speed_up_tower(model: Any) -> None:
    """Let the tower of a transformers model work so, as far as it is built that way and runs sdpa. In place."""
    tower, config = model.model.visual, model.config.vision_config
    if config._attn_implementation == "sdpa" and any(
        "cu_seqlens" in inspect.signature(part.forward).parameters for part in tower.modules()
    ):
        config._attn_implementation = NAME
    for part in tower.modules():
        if type(part) is nn.Conv3d and part.groups == 1 and part.padding == (0, 0, 0):
            part.__class__ = PatchProduct


def _kept(cuts: Tensor) -> Stretches:
    """`stretches_of`, once per tensor: all layers of a pass are handed the same one or two."""
    found: Stretches | None = getattr(cuts, "_mm_grpo_stretches", None)
    if found is None:
        found = stretches_of(cuts)
        cuts._mm_grpo_stretches = found  # type: ignore[attr-defined]
    return found
