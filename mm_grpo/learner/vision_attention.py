"""Attention of vision towers over many images as one sequence, in one sdpa call for each length.

A tower runs the patches of all images of a pack as one sequence, cut into images or windows of 64 patches that attend
within themselves. Those of one length are a batch here; lengths are read from the device once a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mm_grpo.learner.transformers_patches import use_patch_product, use_varlen_attention


@dataclass(frozen=True)
class VarlenBatches:
    """Cuts of a sequence of S patches into batches of one length each."""

    batches: tuple[tuple[int, int], ...]
    """(count, length) of each batch."""
    order: Tensor | None
    """[S]: the patches batch by batch; None if all have one length."""
    back: Tensor | None
    """[S]: undoes `order`."""


def varlen_batches(cuts: Tensor) -> VarlenBatches:
    """Return the batches of the parts between `cuts` [n + 1], which begin with 0 and end with S."""
    positions: list[int] = cuts.tolist()
    starts_by_length: dict[int, list[int]] = {}
    for start, end in pairwise(positions):
        starts_by_length.setdefault(end - start, []).append(start)
    batches = tuple((len(starts), length) for length, starts in starts_by_length.items())
    if len(batches) == 1:
        return VarlenBatches(batches, None, None)
    parts = (torch.tensor(s)[:, None] + torch.arange(length) for length, s in starts_by_length.items())
    order = torch.cat([part.flatten() for part in parts])
    return VarlenBatches(batches, order.to(cuts.device), order.argsort().to(cuts.device))


def varlen_attention(
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
    """Run attention of queries, keys and values [1, H, S, d]; return [1, S, H, d] for transformers."""
    if cu_seq_lens_q is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    cut = _cached_batches(cu_seq_lens_q)
    inputs = [x[0].transpose(0, 1) for x in (query, key, value)]  # [S, H, d]
    if cut.order is not None:
        inputs = [x.index_select(0, cut.order) for x in inputs]
    outs, start = [], 0
    for count, length in cut.batches:
        batch = slice(start, start + count * length)
        q, k, v = (x[batch].unflatten(0, (count, length)).transpose(1, 2) for x in inputs)
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        start = batch.stop
    joined = outs[0] if cut.back is None else torch.cat(outs).index_select(0, cut.back)
    return joined[None], None


def patch_vision_tower(tower: nn.Module) -> None:
    """Patch a tower of transformers in place to use `varlen_attention`, if it takes cuts and runs sdpa."""
    use_varlen_attention(tower, varlen_attention)
    use_patch_product(tower)


def _cached_batches(cuts: Tensor) -> VarlenBatches:
    """Return `varlen_batches` of a tensor, computed once: all layers of a pass get the same one or two tensors."""
    batches: VarlenBatches | None = getattr(cuts, "_mm_grpo_varlen", None)
    if batches is None:
        batches = varlen_batches(cuts)
        cuts._mm_grpo_varlen = batches  # type: ignore[attr-defined]
    return batches
