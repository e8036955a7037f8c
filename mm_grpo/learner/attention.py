"""Attention over shared-prefix rows without paying for what the mask forbids.

A dense mask over a row of N = L + G * T tokens costs N^2, most of it between completions that may not see
each other. Two ways around it, and `Masks` chooses:

    flex     FlexAttention with a block table (flex.py), on GPUs in bfloat16, after a comparison on this machine
    blocks   prompts attend to themselves, causally, and each completion to [its prompt, itself], in plain
             sdpa: L^2 / 2 + G * T * (L + T), in batches of like length

A model whose layers see more or less than all earlier tokens (sliding windows, images whose tokens see each other) gets
one dense mask for each kind of layer. `Masks` returns keyword arguments of the model's forward, which reach every text
layer. Without them `prefix_attention` is transformers' sdpa over the dense mask. Layers of linear attention read no
mask but the pack's completions (linear_attention.py). If prompts run apart (prompt_states.py), their keys and values
precede the pack's in every way.
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
from mm_grpo.learner.shards import is_sharded
from mm_grpo.learner.transformers_patches import unread_mask, use_prefix_attention
from mm_grpo.processors.family import Family

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class PrefixLayout:
    """Batches of a pack, and the tokens that each completion token may attend to: its prompt and its past."""

    batch: CompletionBatch
    masks: tuple[Tensor, ...]
    """[c or 1, 1, T, P + T] for each batch of c completions of up to T tokens, P the longest of their prompts; True if
    a query may attend to the key."""


def prefix_layout(segments: Tensor, batch: CompletionBatch | None = None, before: int = 0) -> PrefixLayout:
    """Return the layout of a pack's segments [B, K + N], of which K = `before` belong to prompts that run apart."""
    batch = batch or completion_batch(segments, before)
    return PrefixLayout(batch, tuple(map(_mask, batch.completions)))


def _mask(sequences: Sequences) -> Tensor:
    (count, tokens), longest = sequences.index.shape, sequences.prompt_index.shape[1]
    device = sequences.index.device
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
    is_prompt = torch.arange(longest, device=device) < sequences.prompt_lengths[:, None]
    if bool(is_prompt.all()):  # prompts of one length: one mask serves all
        return torch.cat([causal.new_ones(1, 1, tokens, longest), causal], -1)
    parts = [is_prompt[:, None, None].expand(-1, 1, tokens, -1), causal.expand(count, -1, -1, -1)]
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
    """Run attention of queries [B, H, N, d] over keys and values [B, K, N, d]; return [B, N, H, d] for transformers."""
    layer: Any = getattr(module, "layer_idx", None)
    if keep_prompt is not None:
        length = keep_prompt.length
        keep_prompt.keep(layer, lambda: (key[:, :, :length], value[:, :, :length]))
    all_keys, all_values = key, value
    prefix_pairs = [] if prefixes is None else prefixes.pairs(layer)
    if prefixes is not None:
        all_keys = prefixes.before(layer, 0, key)
        all_values = prefixes.before(layer, 1, value)
    if flex is not None:
        before = all_keys.shape[2] - key.shape[2]
        padded = pad(query, (0, 0, before, 0)) if before else query
        out = attend(padded, all_keys, all_values, flex, scaling)
        return out[:, :, before:].transpose(1, 2), None
    if prefix is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, all_keys, all_values, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    batch, shape = prefix.batch, (query.shape[0], query.shape[2])
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}

    # [B, N, h, d] -> [r, P, h, d] and [c, T, h, d], batch by batch
    (q, completion_q), (k, completion_k), (v, completion_v) = (
        batch.split(x.transpose(1, 2)) for x in (query, key, value)
    )
    of_prompts = [_sdpa(*qkv, is_causal=True, **options) for qkv in zip(q, k, v, strict=True)]
    k, v = ([*x, *(pair[side].transpose(1, 2) for pair in prefix_pairs)] for side, x in enumerate((k, v)))
    of_completions = []
    for number, (sequences, mask) in enumerate(zip(batch.completions, prefix.masks, strict=True)):
        k_all, v_all = (
            torch.cat([batch.of_prompts(states.transpose(1, 2), prompts, sequences), completions[number]], 1)
            for states, prompts, completions in ((all_keys, k, completion_k), (all_values, v, completion_v))
        )
        of_completions.append(_sdpa(completion_q[number], k_all, v_all, attn_mask=mask, **options))
    return batch.merge(of_prompts, of_completions, shape), None


def _sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Run attention of [n, T, h, d] over [n, S, h, d]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)


class Masks:
    """Maker of the arguments that tell a model's text layers which tokens of a pack attend to which.

    `attn` is the config's `model.attn`. If completions do not share the row of their prompt (not `shared`), the model
    gets the padding alone and makes its masks itself. Raises ConfigError when `attn` is flex_attention, which does not
    work here.
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
        self.apart = shared and not is_sharded(model)
        """True if prompts can run apart from their completions."""
        self.flex = self.blocks and _flex_works(model, attn)
        """True if packs get a `BlockMask` for FlexAttention."""
        self.rule = prepare_linear_layers(model) if shared else None

    @property
    def multiple(self) -> int:
        """Return the multiple that a pack's width is rounded up to; the kernel gets whole blocks, and few widths."""
        return BLOCK if self.flex else 1

    def plan(self, items: Sequence[Item], max_tokens: int, copies: int = 1) -> list[list[list[Item]]]:
        """Return packs of `items` as the model's layers run them best (see `pack.plan`)."""
        layout = {"shared": self.shared, "one_row": self.blocks, "apart": self.apart}
        return plan(items, max_tokens, self.multiple, copies=copies, **layout)

    def of_pack(
        self, pack: Pack, keep_prompt: PromptState | None = None, prefixes: Prefixes | None = None
    ) -> dict[str, Any]:
        """Return keyword arguments of the model's forward for a pack.

        For a prompt that runs alone, `keep_prompt` receives the states that its completions need. `prefixes` are such
        states of the prompts of a pack.
        """
        if not self.shared:
            return {"attention_mask": (pack.segments != PADDING).long()}
        states = {"keep_prompt": keep_prompt, "prefixes": prefixes}
        states = {name: value for name, value in states.items() if value is not None}
        if not self.dense:
            return self.of(pack.whole_segments, keep_prompt, prefixes) | states
        before = 0 if prefixes is None else prefixes.width
        blocks = None
        if self.family is not None and self.looks_ahead:
            blocks = self.family.image_blocks(self.model, pack.input_ids)
            blocks = pad(blocks, (before, 0), value=-1)
        windows = {kind: self.window if kind == SLIDING else None for kind in self.kinds or (SLIDING,)}
        masks = {
            kind: attention_mask(pack.whole_segments, blocks, window)[:, :, before:]
            for kind, window in windows.items()
        }
        return {"attention_mask": masks if self.kinds else masks[SLIDING]} | states

    def of(
        self, segments: Tensor, keep_prompt: PromptState | None = None, prefixes: Prefixes | None = None
    ) -> dict[str, Any]:
        """Return keyword arguments of the model's forward for a pack's segments [B, K + N], without windows."""
        before = 0 if prefixes is None else prefixes.width
        linear, batch = dict[str, Any](), None
        if self.rule is not None:
            batch = completion_batch(segments, before)
            linear = {"shared_state": SharedState(batch, self.rule, keep_prompt, prefixes)}
        unread = {"attention_mask": unread_mask(segments.device)}
        if self.flex:
            return linear | unread | {"flex": block_mask(segments, before)}
        if self.blocks:
            return linear | unread | {"prefix": prefix_layout(segments, batch, before)}
        return linear | {"attention_mask": attention_mask(segments)[:, :, before:]}


def _flex_works(model: Any, attn: str) -> bool:
    """Return True if FlexAttention is tried and right for the model's shapes; ConfigError if asked for and wrong.

    It is tried if it is asked for, and with `attn: auto` on a GPU in 16 bits.
    """
    device = torch.device(model.device)
    # in float32 the compiler (Triton 3.7, heads of 128, compute capability 9.0) leaves the kernel 32 registers and
    # 29 kB of spilled stores: plain attention is faster
    is_fast = device.type == "cuda" and model.dtype != torch.float32
    if attn != "flex_attention" and not (attn == "auto" and is_fast):
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
