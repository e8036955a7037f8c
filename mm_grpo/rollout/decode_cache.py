"""Keys and values of the rows that are decoded together, and their attention.

Rows come and go, token by token. The rows of one prompt share its keys and values; what follows (sampled tokens,
observations) belongs to one row. So a prompt is neither copied nor read once for each of its rows:

    prompts   [P, K, L, d]    one entry for each prompt in use
    tails     [R, K, T, d]    one entry for each row

Both end at the right: a shorter prompt or tail begins in a later column. A new token is a column of all tails. Scores
over prompt and tail are put side by side, [R, K, H / K, L + T] for one softmax.

Layers of linear attention have no such parts: their states [R, ...] are selected and concatenated by rows. Sliding
windows are counted in tokens of prompt and tail together.

transformers' models write to a `Cache` and call the attention that their config names; `DecodeCache` provides both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

DECODE_ATTENTION = "mm_grpo_decode"
"""Name of the attention of a forward pass of one token for each row."""


@dataclass(eq=False)
class CachedPrompt:
    """A prompt in the buffers: its length in tokens, and the number of rows that still need it."""

    length: int
    uses: int


@dataclass(eq=False)
class CachedRow:
    """A row: the prompt that it follows, and the number of tokens in its tail."""

    prompt: CachedPrompt
    tail: int = 0


RowKeyValues = list[tuple[Tensor, Tensor]]
"""Keys and values [K, T, d] of a row's tail, by layer."""


class _Layer(DynamicLayer):
    """Buffers of one layer of attention: a pair of keys and values for prompts, and one for tails."""

    def __init__(self, prompts: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prompts = [part[:0] for part in prompts]
        self.tails = [part[:0, :, :0] for part in prompts]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a token of each row, [R, K, 1, d]. The attention itself reads the buffers."""
        self.tails = [
            torch.cat([b, new], 2) for b, new in zip(self.tails, (key_states, value_states), strict=True)
        ]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.prompts[0].shape[2] + self.tails[0].shape[2]


class DecodeCache:
    """Cache of `rows`, in the order of a forward pass. `config` is the model's text config."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rows: list[CachedRow] = []
        self.prompts: list[CachedPrompt] = []
        self.layers: list[Any] = []
        self.attention_layers: list[_Layer] = []
        # both are rebuilt when rows or prompts change
        self._places: tuple[Tensor, Tensor, int] | None = None
        self._masks: dict[int | None, Tensor] = {}

    # rows that join and leave ----------------------------------------------------------------

    def add_prompts(self, prefilled: Any, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Append `counts[i]` rows behind prompt i of a cache of prompts that are padded on the left."""
        if not self.layers:
            self.layers = [
                _Layer([layer.keys, layer.values]) if is_attention(layer) else layer
                for layer in prefilled.layers
            ]
            self.attention_layers = [layer for layer in self.layers if isinstance(layer, _Layer)]
        index = torch.repeat_interleave(torch.tensor(counts))
        for layer, new in zip(self.layers, prefilled.layers, strict=True):
            if isinstance(layer, _Layer):
                parts = zip(layer.prompts, (new.keys, new.values), strict=True)
                layer.prompts = [_stack(buffer, part) for buffer, part in parts]
                layer.tails = [pad(buffer, (0, 0, 0, 0, 0, 0, 0, len(index))) for buffer in layer.tails]
            else:
                new.reorder_cache(index.to(_states(new)[0][2].device))
                if layer is not new:
                    _fill(layer, new, append=bool(self.rows))
        for length, count in zip(lengths, counts, strict=True):
            prompt = CachedPrompt(length, count)
            self.prompts.append(prompt)
            self.rows += [CachedRow(prompt) for _ in range(count)]
        self._places = None

    def add_row(self, prompt: CachedPrompt, tail: RowKeyValues) -> None:
        """Append a row with a tail behind a prompt that is still in use."""
        for layer, parts in zip(self.attention_layers, tail, strict=True):
            layer.tails = [_stack(b, part[None]) for b, part in zip(layer.tails, parts, strict=True)]
        self.rows.append(CachedRow(prompt, tail[0][0].shape[1]))
        prompt.uses += 1
        self._places = None

    def remove(self, indices: Sequence[int]) -> None:
        """Remove rows, and the prompts that no row follows any more."""
        if not indices:
            return
        stay = [i for i in range(len(self.rows)) if i not in set(indices)]
        longest = max((self.rows[i].tail for i in stay), default=0)
        for layer in self.layers:
            if isinstance(layer, _Layer):
                layer.tails = [_select(buffer, stay, longest) for buffer in layer.tails]
            else:
                layer.reorder_cache(torch.tensor(stay, dtype=torch.long, device=_states(layer)[0][2].device))
        prompts = [self.rows[i].prompt for i in indices]
        self.rows = [self.rows[i] for i in stay]
        self.release(prompts)

    def release(self, prompts: Sequence[CachedPrompt]) -> None:
        """Count one use less of each prompt, and drop unused prompts."""
        for prompt in prompts:
            prompt.uses -= 1
        stay = [i for i, prompt in enumerate(self.prompts) if prompt.uses]
        if len(stay) < len(self.prompts):
            self.prompts = [self.prompts[i] for i in stay]
            longest = max((prompt.length for prompt in self.prompts), default=0)
            for layer in self.attention_layers:
                layer.prompts = [_select(buffer, stay, longest) for buffer in layer.prompts]
        self._places = None

    # a row that ended and is continued -------------------------------------------------------

    def tail_of(self, index: int) -> RowKeyValues:
        """Copy the keys and values of a row's tail."""
        length = self.rows[index].tail
        tail = []
        for layer in self.attention_layers:
            keys, values = (buffer[index, :, buffer.shape[2] - length :].clone() for buffer in layer.tails)
            tail.append((keys, values))
        return tail

    def padded_cache(self, pairs: Sequence[tuple[CachedPrompt, RowKeyValues]]) -> tuple[DynamicCache, Tensor]:
        """Return prompts with tails as a cache of rows that are padded on the left, with its mask [B, N]."""
        lengths = torch.tensor([prompt.length + tail[0][0].shape[1] for prompt, tail in pairs])
        width = int(lengths.max())
        cache = DynamicCache()
        for number, layer in enumerate(self.attention_layers):
            parts = []
            for i, buffer in enumerate(layer.prompts):
                rows = [
                    torch.cat([buffer[self.prompts.index(prompt), :, -prompt.length :], tail[number][i]], 1)
                    for prompt, tail in pairs
                ]
                parts.append(torch.stack([_widen(row, width) for row in rows]))
            cache.update(parts[0], parts[1], number)
        return cache, (torch.arange(width)[None] >= width - lengths[:, None]).long()

    @contextmanager
    def decoding(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of a forward pass of one token for each row, which appends it to the tails."""
        for row in self.rows:
            row.tail += 1
        self._masks.clear()
        self._places = self._places or self._rows_of_prompts()
        AttentionInterface.register(DECODE_ATTENTION, self._attend)
        attention = self.config._attn_implementation
        self.config._attn_implementation = DECODE_ATTENTION
        try:
            # transformers hands a mask of four axes on as it is; `_attend` makes its own
            mask = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=self._device)
            yield {"attention_mask": mask, "past_key_values": Cache(layers=self.layers), "use_cache": True}
        finally:
            self.config._attn_implementation = attention

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend with queries [R, H, 1, d] to the buffers of the module's layer. Returns [R, 1, H, d]."""
        layer = self.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        rows, heads, _, size = query.shape
        scaled = query[:, :, 0] * (size**-0.5 if scaling is None else scaling)
        q = scaled.reshape(rows, key.shape[1], -1, size)
        (prompt_keys, prompt_values), (keys, values) = layer.prompts, layer.tails
        scores = torch.cat(
            [self._by_row(_product(self._by_prompt(q), prompt_keys.mT)), _product(q, keys.mT)], 3
        )
        scores.masked_fill_(self._hidden(sliding_window, prompt_keys, keys), -torch.inf)
        on_prompt, on_tail = scores.softmax(3).to(value.dtype).split([prompt_keys.shape[2], keys.shape[2]], 3)
        output = self._by_row(_product(self._by_prompt(on_prompt), prompt_values)) + _product(on_tail, values)
        return output.to(query.dtype).reshape(rows, 1, heads, size), None

    def _hidden(self, window: int | None, prompts: Tensor, tails: Tensor) -> Tensor:
        """Return the mask [R, 1, 1, L + T] of columns that a row does not attend to."""
        if window not in self._masks:
            device = prompts.device
            length = torch.tensor([row.prompt.length for row in self.rows], device=device)[:, None]
            tail = torch.tensor([row.tail for row in self.rows], device=device)[:, None]
            # distance of a column from the last one of its buffer
            in_prompt, in_tail = (torch.arange(x.shape[2], device=device).flip(0) for x in (prompts, tails))
            hidden = torch.cat([in_prompt >= length, in_tail >= tail], 1)
            if window is not None:
                hidden |= torch.cat([in_prompt + tail, in_tail.expand(len(tail), -1)], 1) >= window
            self._masks[window] = hidden[:, None, None]
        return self._masks[window]

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Reshape rows [R, K, N, d] to [P, K, G * N, d], with zeros for prompts with fewer rows than another."""
        assert self._places is not None
        entries, places, most_rows = self._places
        padded = x.new_zeros(len(self.prompts), most_rows, *x.shape[1:])
        padded[entries, places] = x
        return padded.transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor) -> Tensor:
        """Reshape [P, K, G * N, d] to rows [R, K, N, d]."""
        assert self._places is not None
        entries, places, most_rows = self._places
        by_place: Tensor = x.view(*x.shape[:2], most_rows, -1, x.shape[3]).transpose(1, 2)
        return by_place[entries, places]

    def _rows_of_prompts(self) -> tuple[Tensor, Tensor, int]:
        """Return the prompt of each row, its number among the rows of that prompt, and the most rows of a prompt."""
        entries = torch.tensor([self.prompts.index(row.prompt) for row in self.rows])
        places = (entries[:, None] == entries).tril(-1).sum(1)
        return entries.to(self._device), places.to(self._device), int(places.max()) + 1

    @property
    def _device(self) -> torch.device:
        return self.attention_layers[0].tails[0].device


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return products [A, K, M, N] of [A, K, M, d] and [A, K, d, N], summed in float32, as fused attention does."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return a.float() @ b.float()
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return product.view(*a.shape[:2], *product.shape[1:])


def is_attention(layer: Any) -> bool:
    """Return True when a layer of a cache holds keys and values, not states of linear attention."""
    return isinstance(layer, DynamicLayer)


def full_cache(config: Any) -> DynamicCache:
    """Make an empty cache for a text config in which layers of sliding windows keep every token."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if is_attention(layer) else layer for layer in cache.layers]
    return cache


def _widen(buffer: Tensor, width: int) -> Tensor:
    """Put zeros before a buffer [..., T, d], up to a width."""
    return pad(buffer, (0, 0, width - buffer.shape[-2], 0))


def _stack(buffer: Tensor, more: Tensor) -> Tensor:
    """Append entries [A, K, T, d] to a buffer, which may have another width."""
    width = max(buffer.shape[2], more.shape[2])
    return torch.cat([_widen(buffer, width), _widen(more, width)])


def _select(buffer: Tensor, entries: Sequence[int], width: int) -> Tensor:
    """Return entries of a buffer [A, K, T, d], with their last `width` columns."""
    return buffer[torch.tensor(entries, dtype=torch.long, device=buffer.device), :, buffer.shape[2] - width :]


def _states(layer: Any) -> list[tuple[Any, Any, Tensor]]:
    """List the tensors [R, ...] of a layer of linear attention: (holder, name or number, tensor)."""
    tensors: list[tuple[Any, Any, Tensor]] = []
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        if isinstance(states, dict):
            tensors += [(states, number, state) for number, state in states.items() if state is not None]
        elif states is not None:
            tensors.append((layer, name, states))
    return tensors


def _fill(layer: Any, new: Any, *, append: bool) -> None:
    """Give a layer of linear attention the states of a new one: behind its states, or in their place."""
    for (holder, name, state), (_, _, new_state) in zip(_states(layer), _states(new), strict=True):
        value = torch.cat([state, new_state]) if append else new_state
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)
