"""FlexAttention over shared-prefix rows: what a GPU runs, one kernel that skips the blocks nobody sees.

The kernel is told of the mask twice. `mask_mod` decides each pair of places; the block table says which
squares of 128 x 128 hold any legal pair, and which hold no other. The table is worked out here from what the
segments of a block have in common, without looking at pairs, so it costs (N / 128)^2 and not N^2; a square
that it wrongly takes for mixed costs time, never correctness. The kernel is compiled once, for all
lengths; both go through checkpointed layers as arguments, so a recomputation sees what the first pass saw.

`fault` compares it with torch's plain attention on this machine before anything is trusted to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.learner.pack import PADDING, PROMPT, attention_mask

BLOCK = 128
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest distance from plain attention, as a share of the norm, that is put down to rounding (TF32 included)."""


def block_mask(segments: Tensor) -> BlockMask:
    """The mask of a pack's segments [B, N] (see `pack.attention_mask`), for rows of N tokens."""
    width = segments.shape[1]
    blocks = -(-width // BLOCK)
    padded = torch.nn.functional.pad(segments, (0, blocks * BLOCK - width), value=PADDING)
    tiles = padded.unflatten(1, (blocks, BLOCK))
    prompt = tiles == PROMPT
    # completions of a block: the smallest and the largest number, which overlap where two blocks share one
    low = tiles.masked_fill(tiles <= PROMPT, torch.iinfo(tiles.dtype).max).amin(-1)
    high = tiles.amax(-1)
    shared = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
    place = torch.arange(blocks, device=segments.device)
    before, own = place[:, None] > place, place[:, None] == place
    some = own | (before & (prompt.any(-1)[:, None] | shared))
    # nothing to decide: a block of prompt alone, or one completion in both
    one = (tiles == high[:, :, None]).all(-1) & (high > PROMPT)
    same = (one[:, :, None] & one[:, None]) & (high[:, :, None] == high[:, None])
    every = before & (prompt.all(-1)[:, None] | same)
    return BlockMask.from_kv_blocks(
        *_table(some & ~every),
        *_table(some & every),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(segments),
        seq_lengths=(width, width),
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None = None
) -> Tensor:
    """Queries [B, H, N, d] over keys and values [B, K, N, d], H a multiple of K; returns [B, H, N, d]."""
    result: Tensor = _compiled()(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return result


@cache
def fault(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> str | None:
    """What is wrong with FlexAttention here: a message, or None when it agrees with plain attention.

    Outputs and gradients of a small random pack with every kind of place in it are compared.
    """
    segments = torch.full((2, 300), PADDING)
    for row, lengths in enumerate([(150, 40, 1, 70, 9), (131, 128, 5)]):
        known = torch.tensor([k for k, n in enumerate(lengths) for _ in range(n)])
        segments[row, : len(known)] = known
    segments = segments.to(device)
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (2, heads, 300, size),
        (2, kv_heads, 300, size),
        (2, kv_heads, 300, size),
        (2, heads, 300, size),
    ]
    *inputs, weight = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    weight = weight * (segments != PADDING)[:, None, :, None]
    results: list[list[Tensor]] = []
    mask, dense = block_mask(segments), attention_mask(segments)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=heads != kv_heads)

    try:
        for run in (partial(attend, mask=mask), plain):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = run(*leaves)
            results.append([out.detach() * (weight != 0), *torch.autograd.grad((out * weight).sum(), leaves)])
    except Exception as error:  # whatever a compiler may raise: plain attention is there
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[
            :300
        ]
    for name, got, want in zip(("output", "query", "key", "value"), *results, strict=True):
        distance = float((got.float() - want.float()).norm() / want.float().norm())
        if not distance <= LIMITS[dtype]:
            what = "output" if name == "output" else f"gradient of the {name}"
            return f"its {what} is {distance:.1e} of the norm away from plain attention's"
    return None


def _mask_mod(segments: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        key = segments[b, k]
        allowed = (k <= q) & (key != PADDING) & ((key == PROMPT) | (key == segments[b, q]))
        return allowed | (k == q)  # padding looks at itself, for a softmax over nothing is NaN

    return seen


def _table(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of blocks takes [B, 1, n], and their numbers first [B, 1, n, n]."""
    order = wanted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return wanted.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
