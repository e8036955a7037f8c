"""FlexAttention over shared-prefix rows: one GPU kernel that skips blocks which are masked as a whole.

The kernel takes the mask in two forms. `mask_mod` decides each pair of positions; the block table says which squares of
128 x 128 hold any legal pair, and which hold only legal ones. The table is made from the smallest and largest segment
of each block, of all its tokens and of its prompt tokens, so it costs (N / 128)^2 and not N^2. A square that it wrongly
takes for mixed costs time, never correctness. Both go through checkpointed layers as arguments, so a recomputation has
the mask of the first pass.

torch compiles again for each difference between calls, and after eight graphs it falls back to attention that holds all
N x N scores. So `attend` makes calls equal: whole blocks, two at least; all of query, key and value with gradients or
none; one order in memory; one number of threads (which each thread has, autograd's too). Four graphs are left for a
model: one row or several, with gradients or without. Past GRAPHS the run ends with torch's error.

`fault` compiles the four and compares them with torch's plain attention on this machine, before they are used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.learner.pack import PADDING, SEGMENTS_PER_GROUP, attention_mask, prompt_of

logger = logging.getLogger("mm_grpo")

BLOCK = 128
GRAPHS = 64
"""Limit of graphs in a process: four for each shape of heads, and more if user code changes torch's settings."""
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest distance from plain attention, as a share of the norm, that counts as rounding (TF32 included)."""


def block_mask(segments: Tensor, before: int = 0) -> BlockMask:
    """Return the mask of a pack's segments [B, N] (see `pack.attention_mask`), padded to whole blocks, two at least.

    The first `before`, whole blocks, are keys of prompts that run apart; queries there are ignored.
    """
    width = segments.shape[1]
    blocks = max(-(-width // BLOCK), 2)  # a graph for one block would serve no other number
    padded = torch.nn.functional.pad(segments, (0, blocks * BLOCK - width), value=PADDING)
    tiles = padded.unflatten(1, (blocks, BLOCK))
    infinity = torch.iinfo(tiles.dtype).max
    is_prompt, groups = tiles % SEGMENTS_PER_GROUP == 0, prompt_of(tiles)
    # smallest and largest of a block: its segments, its tokens' groups, its prompts' groups; they never decrease along
    # a row, so two blocks share something if these ranges overlap
    low, high = tiles.masked_fill(tiles == PADDING, infinity).amin(-1), tiles.amax(-1)
    first, last = prompt_of(low), prompt_of(high)
    prompt_low = groups.masked_fill(~is_prompt, infinity).amin(-1)
    prompt_high = groups.masked_fill(~is_prompt, PADDING).amax(-1)
    shared = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
    sees = (first[:, :, None] <= prompt_high[:, None]) & (prompt_low[:, None] <= last[:, :, None])
    number = torch.arange(blocks, device=segments.device)
    earlier, diagonal = number[:, None] > number, number[:, None] == number
    has_queries = number[:, None] >= before // BLOCK
    partial = diagonal | (earlier & (shared | sees) & has_queries)
    # nothing to decide: only keys of one prompt and only queries of its group, or one completion in both
    uniform = (tiles == high[:, :, None]).all(-1) & (high > PADDING)
    of_group = (groups == last[:, :, None]).all(-1) & (high > PADDING)
    same = high[:, :, None] == high[:, None]
    from_prompt = is_prompt.all(-1)[:, None] & (last[:, :, None] == high[:, None])
    full = earlier & has_queries & uniform[:, None]
    full &= (uniform[:, :, None] & same) | (of_group[:, :, None] & from_prompt)
    return BlockMask.from_kv_blocks(
        *_table(partial & ~full),
        *_table(partial & full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(padded),
        seq_lengths=(blocks * BLOCK, blocks * BLOCK),
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None = None
) -> Tensor:
    """Attend with queries [B, H, N, d] to keys and values [B, K, N, d], H a multiple of K; return [B, H, N, d]."""
    width, size = query.shape[2:]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    inputs = [_uniform(x, mask.seq_lengths[0], learns) for x in (query, key, value)]
    # torch compiles one more graph for an explicit scale, so the default is left to the kernel
    is_default = scaling is None or math.isclose(scaling, size**-0.5)
    options: dict[str, Any] = {
        "scale": None if is_default else scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    with torch.set_grad_enabled(learns), _for_all_sizes():
        result: Tensor = _compiled()(*inputs, block_mask=mask, **options)
    return result if result.shape[2] == width else result[:, :, :width]


@cache
def fault(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> str | None:
    """Compare FlexAttention with plain attention on this machine; return None if they agree, else a message.

    A small random pack with every kind of square is compared, and its first row alone, so that all graphs that a model
    needs are compiled.
    """
    width = 430
    segments = torch.full((2, width), PADDING)
    # squares decided by the prompt, by two completions that meet in one, by one completion over three blocks, and by
    # two groups in a row
    for row, groups in enumerate([((150, 40, 1), (20, 50, 9)), ((100, 28, 300),)]):
        values = [
            g * SEGMENTS_PER_GROUP + k
            for g, lengths in enumerate(groups)
            for k, n in enumerate(lengths)
            for _ in range(n)
        ]
        segments[row, : len(values)] = torch.tensor(values)
    segments = segments.to(device)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, width, h, size, generator=generator).to(device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    try:
        # the backward pass is compiled when it first runs, so it needs the settings too
        with _for_all_sizes():
            distances = [_distances(segments[:rows], [x[:rows] for x in inputs]) for rows in (2, 1)]
    except Exception as error:  # a compiler may raise anything, and plain attention is the alternative
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
    for result, distance in (pair for results in distances for pair in results.items()):
        if not distance <= LIMITS[dtype]:
            return f"its {result} is {distance:.1e} of the norm away from torch's"
    return None


@cache
def warn_once(message: str) -> None:
    """Log a warning once: each scoring of a canary wraps a model, which would warn again."""
    logger.warning(message)


def _distances(segments: Tensor, inputs: list[Tensor]) -> dict[str, float]:
    """Return the distances of outputs and gradients from plain attention's, as shares of the norm.

    Segments are [B, N]; inputs are query, key, value and the weight of each output, all [B, N, h, d].
    """
    query, key, value, weight = (x.transpose(1, 2) for x in inputs)  # as a model's projections lie in memory
    weight = weight * (segments != PADDING)[:, None, :, None]
    mask, dense = block_mask(segments), attention_mask(segments)
    gqa = query.shape[1] != key.shape[1]
    flex = partial(attend, mask=mask)
    plain = partial(scaled_dot_product_attention, attn_mask=dense, enable_gqa=gqa)
    results: list[list[Tensor]] = []
    for run in (flex, plain):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = run(*leaves)
        gradients = torch.autograd.grad((out * weight).sum(), leaves)
        with torch.no_grad():
            inference = run(*leaves)
        results.append([out.detach() * (weight != 0), *gradients, inference * (weight != 0)])
    gradients_of = [f"gradient of the {x}" for x in ("query", "key", "value")]
    names = ("output", *gradients_of, "output without gradients")
    return {
        name: float((got.float() - want.float()).norm() / want.float().norm())
        for name, got, want in zip(names, *results, strict=True)
    }


def _mask_mod(segments: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    prompts = prompt_of(segments)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        key = segments[b, k]
        legal = (k <= q) & (key != PADDING) & ((key == prompts[b, q]) | (key == segments[b, q]))
        return legal | (k == q)  # padding attends to itself, because a softmax over nothing is NaN

    return allowed


def _table(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row are True [B, 1, n], and all numbers, True ones first [B, 1, n, n]."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _uniform(x: Tensor, width: int, learns: bool) -> Tensor:
    """Return `x` [B, h, N, d] padded to [B, h, width, d], as [B, width, h, d] in memory, with a gradient or without."""
    # no view: torch compiles again for what a view is a view of; and a single row gets the strides of one among several
    x = x.transpose(1, 2)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, width - x.shape[1])) if x.shape[1] < width else x
    x = x.contiguous().flatten(0, 1).unflatten(0, (len(x), width)).transpose(1, 2)
    if learns and x.requires_grad:
        plain: Tensor = _Plain.apply(x)  # type: ignore[no-untyped-call]
        return plain
    return x.detach().requires_grad_(learns)


class _Plain(torch.autograd.Function):
    """Identity whose result is no view: the same memory as a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@contextmanager
def _for_all_sizes() -> Iterator[None]:
    """Compile for any sizes, also if some happen to be equal now, and for many models in a process."""
    # torch keeps the limit and the number of threads for each thread, so each call sets them
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of CPU kernels, which the graph counts and does not use
    try:
        with dynamo.patch(recompile_limit=GRAPHS), shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            yield
    finally:
        torch.set_num_threads(threads)


def _kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Call flex_attention. torch counts graphs by function, and other libraries compile flex_attention too."""
    result: Tensor = flex_attention(query, key, value, **options)
    return result


@cache
def _compiled() -> Any:
    return torch.compile(_kernel, dynamic=True, fullgraph=True)
