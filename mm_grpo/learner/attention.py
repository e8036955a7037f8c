"""Attention over shared-prefix rows without paying for what the mask forbids.

A dense mask over a row of N = L + G * T tokens costs N^2, most of it between completions that may not see
each other. Here prompts attend to themselves, causally, and each completion attends to [its prompt,
itself]: L^2 / 2 + G * T * (L + T). `prefix_layout` says when that is the cheaper way, and PackForward hands
the layout to every text layer as a keyword argument; without one the function is transformers' sdpa.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "mm_grpo_prefix"


@dataclass(frozen=True)
class PrefixLayout:
    """Where the C completions of a pack's B rows lie.

    `prompt` is the longest prompt; `rows` [C] name each completion's row; `index` [C, T] are flat places
    in the B * N tokens (0 where a completion is shorter than T), `real` [C, T] tell those that are there;
    `mask` [C or 1, 1, T, prompt + T] is True where a completion's query may look.
    """

    prompt: int
    rows: Tensor
    index: Tensor
    real: Tensor
    mask: Tensor


def prefix_layout(segments: Tensor) -> PrefixLayout | None:
    """The layout of a pack's segments [B, N]; None when the dense mask is no dearer."""
    rows, width = segments.shape
    prompts = (segments == 0).sum(1)
    longest = int(prompts.max())
    pairs = [(b, k) for b in range(rows) for k in range(1, int(segments[b].max()) + 1)]
    places = [(segments[b] == k).nonzero()[:, 0] + b * width for b, k in pairs]
    tokens = max(len(p) for p in places)
    if longest**2 / 2 * rows + len(pairs) * tokens * (longest + tokens) >= rows * width**2:
        return None
    device = segments.device
    index = torch.zeros(len(pairs), tokens, dtype=torch.long, device=device)
    real = torch.zeros(len(pairs), tokens, dtype=torch.bool, device=device)
    for i, place in enumerate(places):
        index[i, : len(place)] = place
        real[i, : len(place)] = True
    row_of = torch.tensor([b for b, _ in pairs], device=device)
    own = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
    if bool((prompts == longest).all()):  # one mask serves all
        mask = torch.cat([own.new_ones(1, 1, tokens, longest), own], -1)
    else:
        seen = torch.arange(longest, device=device) < prompts[row_of, None]
        parts = [seen[:, None, None].expand(-1, 1, tokens, -1), own.expand(len(pairs), -1, -1, -1)]
        mask = torch.cat(parts, -1)
    return PrefixLayout(longest, row_of, index, real, mask)


def prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    prefix: PrefixLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Queries [B, H, N, d] over keys and values [B, K, N, d]; returns [B, N, H, d], as transformers asks."""
    if prefix is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    batch, heads, width, size = query.shape
    length = prefix.prompt
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": heads != key.shape[1]}
    of_prompts = scaled_dot_product_attention(
        query[:, :, :length], key[:, :, :length], value[:, :, :length], is_causal=True, **options
    )

    def completions(x: Tensor) -> Tensor:  # [B, h, N, d] -> [C, h, T, d]
        return x.transpose(1, 2).flatten(0, 1)[prefix.index].transpose(1, 2)

    def with_prompt(x: Tensor) -> Tensor:  # [B, h, N, d] -> [C, h, prompt + T, d]
        return torch.cat([x[:, :, :length][prefix.rows], completions(x)], 2)

    of_completions = scaled_dot_product_attention(
        completions(query), with_prompt(key), with_prompt(value), attn_mask=prefix.mask, **options
    )
    # prompts first; places past a short prompt hold nonsense until the completions are laid over them
    out = torch.cat([of_prompts.transpose(1, 2), query.new_zeros(batch, width - length, heads, size)], 1)
    flat = of_completions.transpose(1, 2)[prefix.real]
    return out.flatten(0, 1).index_copy(0, prefix.index[prefix.real], flat).unflatten(0, (batch, width)), None


AttentionInterface.register(NAME, prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def enable(model: Any) -> bool:
    """Let the text layers of `model` take a prefix layout, where they run sdpa; all else goes on as before."""
    text = model.config.get_text_config()
    if text._attn_implementation == "sdpa":
        text._attn_implementation = NAME
    return bool(text._attn_implementation == NAME)
