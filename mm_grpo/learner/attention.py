"""Attention over shared-prefix rows without paying for what the mask forbids.

A dense mask over a row of N = L + G * T tokens costs N^2, most of it between completions that may not see
each other. Two ways around it, and `Masks` chooses:

    flex     FlexAttention with a block table (flex.py), on GPUs in bfloat16, where it was compared and is right
    blocks   prompts attend to themselves, causally, and each completion to [its prompt, itself], in plain
             sdpa: L^2 / 2 + G * T * (L + T), in batches of like length

A model whose layers see more or less than all tokens before (sliding windows, images whose tokens see each other) gets
one dense mask for each kind of layer. What `Masks` makes reaches every text layer as keyword arguments of the model's
forward; without any `prefix_attention` is transformers' sdpa over the dense mask. Layers of linear attention look at
no mask: they are given the pack's completions (linear_attention.py). Where prompts are run apart (prompt_states.py)
their keys and values come before those of the pack, whichever way is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mm_grpo.errors import ConfigError
from mm_grpo.learner.completion_batch import CompletionBatch, Sequences, completion_batch
from mm_grpo.learner.flex import BLOCK, attend, block_mask, fault, warn_once
from mm_grpo.learner.linear_attention import SharedState, prepare_linear_layers
from mm_grpo.learner.pack import PADDING, Item, Pack, attention_mask, plan
from mm_grpo.learner.prompt_states import Prefixes, PromptState
from mm_grpo.learner.transformers_patches import unread_mask, use_prefix_attention
from mm_grpo.processors.family import Family

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class PrefixLayout:
    """The batches of a pack, and what each token of their completions may look at: its prompt and what is before it.

    For each batch of c completions of up to T tokens, a mask [c or 1, 1, T, P + T], with P the longest of their
    prompts, is True where a completion's query may look.
    """

    batch: CompletionBatch
    masks: tuple[Tensor, ...]


def prefix_layout(segments: Tensor, batch: CompletionBatch | None = None, before: int = 0) -> PrefixLayout:
    """The layout of a pack's segments [B, K + N], K = `before` of prompts that are run apart, whose `batch` may be
    known."""
    batch = batch or completion_batch(segments, before)
    return PrefixLayout(batch, tuple(_mask(own) for own in batch.completions))


def _mask(own: Sequences) -> Tensor:
    (count, tokens), longest, device = own.index.shape, own.prompt_index.shape[1], own.index.device
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
    seen = torch.arange(longest, device=device) < own.prompt_lengths[:, None]
    if bool(seen.all()):  # one mask serves all
        return torch.cat([causal.new_ones(1, 1, tokens, longest), causal], -1)
    parts = [seen[:, None, None].expand(-1, 1, tokens, -1), causal.expand(count, -1, -1, -1)]
    return torch.cat(parts, -1)


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
    keep_prompt: PromptState | None = None,
    prefixes: Prefixes | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Queries [B, H, N, d] over keys and values [B, K, N, d]; returns [B, N, H, d], as transformers asks."""
    layer: Any = getattr(module, "layer_idx", None)
    if keep_prompt is not None:
        length = keep_prompt.length
        keep_prompt.keep(layer, lambda: (key[:, :, :length], value[:, :, :length]))
    whole_key, whole_value = key, value
    apart = [] if prefixes is None else prefixes.pairs(layer)
    if prefixes is not None:
        whole_key = prefixes.before(layer, 0, key)
        whole_value = prefixes.before(layer, 1, value)
    if flex is not None:
        before = whole_key.shape[2] - key.shape[2]
        padded = pad(query, (0, 0, before, 0)) if before else query
        out = attend(padded, whole_key, whole_value, flex, scaling)
        return out[:, :, before:].transpose(1, 2), None
    if prefix is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, whole_key, whole_value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    batch, shape = prefix.batch, (query.shape[0], query.shape[2])
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}

    # [B, N, h, d] -> [r, P, h, d] and [c, T, h, d], batch by batch
    (q, own_q), (k, own_k), (v, own_v) = (batch.split(x.transpose(1, 2)) for x in (query, key, value))
    of_prompts = [_sdpa(*each, is_causal=True, **options) for each in zip(q, k, v, strict=True)]
    k, v = ([*x, *(pair[side].transpose(1, 2) for pair in apart)] for side, x in enumerate((k, v)))
    of_completions = []
    for number, (own, mask) in enumerate(zip(batch.completions, prefix.masks, strict=True)):
        k_all, v_all = (
            torch.cat([batch.of_prompts(whole.transpose(1, 2), prompts, own), mine[number]], 1)
            for whole, prompts, mine in ((whole_key, k, own_k), (whole_value, v, own_v))
        )
        of_completions.append(_sdpa(own_q[number], k_all, v_all, attn_mask=mask, **options))
    return batch.merge(of_prompts, of_completions, shape), None


def _sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention of [n, T, h, d] over [n, S, h, d]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)


class Masks:
    """The arguments that tell a model's text layers who sees whom in a pack. `attn` is the config's `model.attn`.

    Where completions are not `shared` rows of a prompt, the model is told what is padding, and makes its masks itself.
    Raises ConfigError when `flex_attention` is asked for and does not work here.
    """

    def __init__(
        self, model: Any, attn: str = "auto", *, family: Family | None = None, shared: bool = True
    ) -> None:
        text = model.config.get_text_config()
        self.model, self.family, self.shared = model, family, shared
        kinds = set(getattr(text, "layer_types", None) or ())
        windowed = SLIDING in kinds or (not kinds and getattr(text, "sliding_window", None))
        self.looks_ahead = family is not None and family.looks_ahead
        self.window: int | None = text.sliding_window if windowed else None
        self.dense = self.looks_ahead or self.window is not None
        self.kinds = sorted(kinds)
        plain = shared and not self.dense
        use_prefix_attention(text, prefix_attention)
        if attn == "flex_attention" and not plain:
            raise ConfigError(
                f"model.attn = 'flex_attention' does not work for a {text.model_type}: its masks are those of sliding "
                "windows or of images that look ahead, or its completions are laid out unshared; write auto or sdpa"
            )
        self.blocks = plain
        self.apart = shared  # whether prompts can be run apart from their completions
        # whether packs get a `BlockMask` for FlexAttention
        self.flex = self.blocks and _flex_works(model, attn)
        self.rule = prepare_linear_layers(model) if shared else None

    @property
    def multiple(self) -> int:
        """Multiple that a pack's width is rounded up to: few different widths, and whole blocks, for the kernel."""
        return BLOCK if self.flex else 1

    def plan(self, items: Sequence[Item], max_tokens: int, copies: int = 1) -> list[list[list[Item]]]:
        """Packs of `items` as the model's layers run them best (see `pack.plan`)."""
        how = {"shared": self.shared, "one_row": self.blocks, "apart": self.apart}
        return plan(items, max_tokens, self.multiple, copies=copies, **how)

    def of_pack(
        self, pack: Pack, keep_prompt: PromptState | None = None, prefixes: Prefixes | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a pack.

        Of a prompt alone `keep_prompt` takes what its completions need; `prefixes` are what was kept of a pack's.
        """
        if not self.shared:
            return {"attention_mask": (pack.segments != PADDING).long()}
        states = {"keep_prompt": keep_prompt, "prefixes": prefixes}
        given = {name: value for name, value in states.items() if value is not None}
        if not self.dense:
            return self.of(pack.whole_segments, keep_prompt, prefixes) | given
        before = 0 if prefixes is None else prefixes.width
        blocks = None
        if self.family is not None and self.looks_ahead:
            blocks = self.family.image_blocks(self.model, pack.input_ids)
            blocks = pad(blocks, (before, 0), value=-1)
        windows = {kind: self.window if kind == SLIDING else None for kind in self.kinds or (SLIDING,)}
        made = {
            kind: attention_mask(pack.whole_segments, blocks, window)[:, :, before:]
            for kind, window in windows.items()
        }
        return {"attention_mask": made if self.kinds else made[SLIDING]} | given

    def of(
        self, segments: Tensor, keep_prompt: PromptState | None = None, prefixes: Prefixes | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a pack's segments [B, K + N], where these say all."""
        before = 0 if prefixes is None else prefixes.width
        made, batch = dict[str, Any](), None
        if self.rule is not None:
            batch = completion_batch(segments, before)
            made = {"shared_state": SharedState(batch, self.rule, keep_prompt, prefixes)}
        unread = {"attention_mask": unread_mask(segments.device)}
        if self.flex:
            return made | unread | {"flex": block_mask(segments, before)}
        if self.blocks:
            return made | unread | {"prefix": prefix_layout(segments, batch, before)}
        return made | {"attention_mask": attention_mask(segments)[:, :, before:]}


def is_tried(attn: str, device: torch.device, dtype: torch.dtype) -> bool:
    """True when FlexAttention is asked for, or to be expected: on a GPU, with numbers of 16 bits.

    In float32 the compiler (Triton 3.7, for heads of 128 on compute capability 9.0) leaves the kernel 32 registers
    and 29 kB of spilled stores, so that there plain attention is taken unless the config says otherwise.
    """
    return attn == "flex_attention" or (attn == "auto" and device.type == "cuda" and dtype != torch.float32)


def _flex_works(model: Any, attn: str) -> bool:
    """True when FlexAttention is to be used: it is tried, and right for the model's shapes."""
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
        warn_once(f"FlexAttention is not used on {device}: {wrong}; attention goes block by block in sdpa")
    return wrong is None
