"""Attention over shared-prefix rows without paying for what the mask forbids.

A dense mask over a row of N = L + G * T tokens costs N^2, most of it between completions that may not see
each other. Two ways around it, and `Masks` chooses:

    flex     FlexAttention with a block table (flex.py), on GPUs in bfloat16, where it was compared and is right
    blocks   prompts attend to themselves, causally, and each completion to [its prompt, itself], in plain
             sdpa: L^2 / 2 + G * T * (L + T), where `prefix_layout` finds that cheaper

A model whose layers see more or less than all tokens before (sliding windows, images whose tokens see each other) gets
one dense mask for each kind of layer. What `Masks` makes reaches every text layer as keyword arguments of the model's
forward; without any `prefix_attention` is transformers' sdpa over the dense mask. Layers of linear attention look at
no mask: they are given the pack's completions (linear_attention.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mm_grpo.errors import ConfigError
from mm_grpo.learner.completion_batch import CompletionBatch, completion_batch
from mm_grpo.learner.flex import BLOCK, attend, block_mask, fault
from mm_grpo.learner.linear_attention import SharedState, prepare_linear_layers
from mm_grpo.learner.pack import PADDING, Pack, attention_mask
from mm_grpo.learner.transformers_patches import unread_mask, use_prefix_attention
from mm_grpo.processors.family import Family

SLIDING = "sliding_attention"
logger = logging.getLogger("mm_grpo")


@dataclass(frozen=True)
class PrefixLayout:
    """The C completions of a pack, and what each of their T tokens may look at: its prompt and what is before it.

    `mask` [C or 1, 1, T, P + T], with P the longest prompt, is True where a completion's query may look.
    """

    batch: CompletionBatch
    mask: Tensor


def prefix_layout(segments: Tensor, batch: CompletionBatch | None = None) -> PrefixLayout | None:
    """The layout of a pack's segments [B, N], whose `batch` may be known; None when the dense mask is no dearer."""
    rows, width = segments.shape
    batch = batch or completion_batch(segments)
    longest, (count, tokens) = batch.prompt, batch.index.shape
    if longest**2 / 2 * rows + count * tokens * (longest + tokens) >= rows * width**2:
        return None
    own = torch.ones(tokens, tokens, dtype=torch.bool, device=segments.device).tril()[None, None]
    if batch.equal:  # one mask serves all
        mask = torch.cat([own.new_ones(1, 1, tokens, longest), own], -1)
    else:
        seen = torch.arange(longest, device=segments.device) < batch.lengths[batch.rows, None]
        parts = [seen[:, None, None].expand(-1, 1, tokens, -1), own.expand(count, -1, -1, -1)]
        mask = torch.cat(parts, -1)
    return PrefixLayout(batch, mask)


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
    flex: BlockMask | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Queries [B, H, N, d] over keys and values [B, K, N, d]; returns [B, N, H, d], as transformers asks."""
    if flex is not None:
        return attend(query, key, value, flex, scaling).transpose(1, 2), None
    if prefix is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    width = query.shape[2]
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}

    def split(x: Tensor) -> tuple[Tensor, Tensor]:  # [B, h, N, d] -> [B, h, P, d], [C, h, T, d]
        prompts, own = prefix.batch.split(x.transpose(1, 2))
        return prompts.transpose(1, 2), own.transpose(1, 2)

    def after_prompt(prompts: Tensor, own: Tensor) -> Tensor:  # -> [C, h, P + T, d]
        return torch.cat([prefix.batch.of_prompt(prompts), own], 2)

    (q, own_q), (k, own_k), (v, own_v) = split(query), split(key), split(value)
    of_prompts = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    of_completions = scaled_dot_product_attention(
        own_q, after_prompt(k, own_k), after_prompt(v, own_v), attn_mask=prefix.mask, **options
    )
    return prefix.batch.merge(of_prompts.transpose(1, 2), of_completions.transpose(1, 2), width), None


class Masks:
    """The arguments that tell a model's text layers who sees whom in a pack. `attn` is the config's `model.attn`.

    Where completions are not `shared` rows of a prompt, the model is told what is padding, and makes its masks itself.
    Models with sliding windows or with images that look ahead get a dense mask for each kind of layer.
    Raises ConfigError when `flex_attention` is asked for and does not work here.
    """

    def __init__(
        self, model: Any, attn: str = "auto", *, family: Family | None = None, shared: bool = True
    ) -> None:
        text = model.config.get_text_config()
        self.model, self.family, self.shared = model, family, shared
        self.dtype: torch.dtype = model.dtype
        self.eager = text._attn_implementation == "eager"
        kinds = set(getattr(text, "layer_types", None) or ())
        self.looks_ahead = family is not None and family.looks_ahead
        self.window: int | None = text.sliding_window if SLIDING in kinds else None
        self.dense = self.looks_ahead or self.window is not None
        self.kinds = sorted(kinds)
        plain = shared and not self.dense
        if attn == "flex_attention" and not plain:
            raise ConfigError(
                f"model.attn = 'flex_attention' does not work for a {text.model_type}: its masks are those of sliding "
                "windows or of images that look ahead, or its completions are laid out unshared; write auto or sdpa"
            )
        self.blocks = use_prefix_attention(text, prefix_attention) and plain
        self.flex = self.blocks and _flex_works(model, attn)
        self.rule = prepare_linear_layers(model) if shared else None

    @property
    def multiple(self) -> int:
        """What the width of a pack is rounded up to: few different widths, and whole blocks, for the kernel."""
        return BLOCK if self.flex else 1

    def of_pack(self, pack: Pack) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a pack."""
        if not self.shared:
            return {"attention_mask": (pack.segments != PADDING).long()}
        if not self.dense:
            return self.of(pack.segments)
        blocks = None
        if self.family is not None and self.looks_ahead:
            blocks = self.family.image_blocks(self.model, pack.input_ids)
        full = self._as_layers_take_it(attention_mask(pack.segments, blocks))
        if not self.kinds:
            return {"attention_mask": full}
        by_kind = dict.fromkeys(self.kinds, full)
        if self.window is not None:
            sliding = attention_mask(pack.segments, blocks, pack.position_ids, self.window)
            by_kind[SLIDING] = self._as_layers_take_it(sliding)
        return {"attention_mask": by_kind}

    def of(self, segments: Tensor) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a pack's segments [B, N], where these say all."""
        if self.rule is None:
            return self._of_attention(segments, None)
        batch = completion_batch(segments)
        return self._of_attention(segments, batch) | {"shared_state": SharedState(batch, self.rule)}

    def _of_attention(self, segments: Tensor, batch: CompletionBatch | None) -> dict[str, Any]:
        if self.flex:
            return {"flex": block_mask(segments), "attention_mask": unread_mask(segments.device)}
        prefix = prefix_layout(segments, batch) if self.blocks else None
        if prefix is not None:
            return {"prefix": prefix, "attention_mask": unread_mask(segments.device)}
        return {"attention_mask": self._as_layers_take_it(attention_mask(segments))}

    def _as_layers_take_it(self, mask: Tensor) -> Tensor:
        """Eager adds its mask, sdpa selects by it."""
        if not self.eager:
            return mask
        floor = torch.finfo(self.dtype).min
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, floor)


def is_tried(attn: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlexAttention is asked for, or to be expected: on a GPU, with numbers of 16 bits.

    In float32 the compiler (Triton 3.7, for heads of 128 on compute capability 9.0) leaves the kernel 32 registers
    and 29 kB of spilled stores, so that there plain attention is taken unless the config says otherwise.
    """
    return attn == "flex_attention" or (attn == "auto" and device.type == "cuda" and dtype != torch.float32)


def _flex_works(model: Any, attn: str) -> bool:
    """Whether FlexAttention is to be used: it is tried, and right for the model's shapes."""
    device = torch.device(model.device)
    if not is_tried(attn, device, model.dtype):
        return False
    text = model.config.get_text_config()
    heads: int = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    wrong = fault(device, model.dtype, heads, text.num_key_value_heads, size)
    if wrong is not None and attn == "flex_attention":
        raise ConfigError(
            f"model.attn = 'flex_attention' does not work on {device}: {wrong}; write auto or sdpa"
        )
    if wrong is not None:
        logger.warning(
            "FlexAttention is not used on %s: %s; attention goes block by block in sdpa", device, wrong
        )
    return wrong is None
