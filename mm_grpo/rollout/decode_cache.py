"""Keys and values of the rows that are decoded together, and their attention.

Rows come and go, token by token. Those of one prompt share its keys and values; what follows them, sampled tokens and
observations, is a row's own. So a prompt is neither copied nor read once for each of its rows:

    prefix    [P, K, L, d]    one entry for each prompt in use
    tail      [R, K, T, d]    one entry for each row

Both end at the right: a prompt or tail that is shorter begins in a later column. A new token is a column of all tails.
Scores over prefix and tail are put side by side, [R, K, H / K, L + T], for one softmax.

Layers of linear attention have no such parts: their states [R, ...] are selected and put together by rows, as
transformers keeps them. Sliding windows are counted in tokens of prompt and tail together.

transformers' models write to a `Cache` and call the attention that is registered under the name in their config:
`DecodeCache` is the one and has the other, for forward passes of one token for each row.
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
"""The attention of a forward pass of one token for each row."""


@dataclass(eq=False)
class Prefix:
    """A prompt in the buffers: its length in tokens, and how many rows still need it."""

    length: int
    uses: int


@dataclass(eq=False)
class Row:
    """A row: the prompt that it follows, and how many tokens of its own are in the buffers."""

    prefix: Prefix
    tail: int = 0


Tail = list[tuple[Tensor, Tensor]]
"""Keys and values [K, T, d] of a row's own tokens, by layer."""


class _Layer(DynamicLayer):
    """The buffers of one layer of attention, keys and values."""

    def __init__(self, prompts: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prefix = [part[:0] for part in prompts]
        self.tail = [part[:0, :, :0] for part in prompts]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a token of each row, [R, K, 1, d]; what is attended to is in the buffers."""
        self.tail = [
            torch.cat([b, new], 2) for b, new in zip(self.tail, (key_states, value_states), strict=True)
        ]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.prefix[0].shape[2] + self.tail[0].shape[2]


class DecodeCache:
    """The cache of `rows`, in the order of a forward pass. `config` is the model's text config."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rows: list[Row] = []
        self.prefixes: list[Prefix] = []
        self.layers: list[Any] = []
        self.attended: list[_Layer] = []
        self._places: tuple[Tensor, Tensor, int] | None = None
        self._masks: dict[int | None, Tensor] = {}

    # what comes and goes ---------------------------------------------------------------------

    def add_prompts(self, prefilled: Any, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Append `counts[i]` rows behind prompt i of a cache of prompts that are padded on the left."""
        if not self.layers:
            self.layers = [
                _Layer([layer.keys, layer.values]) if is_attention(layer) else layer
                for layer in prefilled.layers
            ]
            self.attended = [layer for layer in self.layers if isinstance(layer, _Layer)]
        index = torch.repeat_interleave(torch.tensor(counts))
        for own, new in zip(self.layers, prefilled.layers, strict=True):
            if isinstance(own, _Layer):
                parts = zip(own.prefix, (new.keys, new.values), strict=True)
                own.prefix = [_stacked(buffer, part) for buffer, part in parts]
                own.tail = [pad(buffer, (0, 0, 0, 0, 0, 0, 0, len(index))) for buffer in own.tail]
            else:
                new.reorder_cache(index.to(_states(new)[0][2].device))
                if own is not new:
                    _fill(own, new, append=bool(self.rows))
        for length, count in zip(lengths, counts, strict=True):
            prefix = Prefix(length, count)
            self.prefixes.append(prefix)
            self.rows += [Row(prefix) for _ in range(count)]
        self._places = None

    def add_row(self, prefix: Prefix, tail: Tail) -> None:
        """Append a row behind a prompt that is still in use, with tokens of its own."""
        for layer, parts in zip(self.attended, tail, strict=True):
            layer.tail = [_stacked(b, part[None]) for b, part in zip(layer.tail, parts, strict=True)]
        self.rows.append(Row(prefix, tail[0][0].shape[1]))
        prefix.uses += 1
        self._places = None

    def remove(self, gone: Sequence[int]) -> None:
        """Remove rows, and the prompts that nothing follows any more."""
        if not gone:
            return
        left = [i for i in range(len(self.rows)) if i not in set(gone)]
        longest = max((self.rows[i].tail for i in left), default=0)
        for layer in self.layers:
            if isinstance(layer, _Layer):
                layer.tail = [_selected(buffer, left, longest) for buffer in layer.tail]
            else:
                layer.reorder_cache(torch.tensor(left, dtype=torch.long, device=_states(layer)[0][2].device))
        ended = [self.rows[i].prefix for i in gone]
        self.rows = [self.rows[i] for i in left]
        self.release(ended)

    def release(self, prefixes: Sequence[Prefix]) -> None:
        """One use less of each prompt; those without one are dropped."""
        for prefix in prefixes:
            prefix.uses -= 1
        left = [i for i, prefix in enumerate(self.prefixes) if prefix.uses]
        if len(left) < len(self.prefixes):
            self.prefixes = [self.prefixes[i] for i in left]
            longest = max((prefix.length for prefix in self.prefixes), default=0)
            for layer in self.attended:
                layer.prefix = [_selected(buffer, left, longest) for buffer in layer.prefix]
        self._places = None

    # a row that ended and goes on ------------------------------------------------------------

    def tail_of(self, number: int) -> Tail:
        """A copy of the keys and values of a row's own tokens."""
        length = self.rows[number].tail
        found = []
        for layer in self.attended:
            keys, values = (buffer[number, :, buffer.shape[2] - length :].clone() for buffer in layer.tail)
            found.append((keys, values))
        return found

    def joined(self, kept: Sequence[tuple[Prefix, Tail]]) -> tuple[DynamicCache, Tensor]:
        """Prompts with tails as a cache of rows that are padded on the left, with its mask [B, N]."""
        lengths = torch.tensor([prefix.length + tail[0][0].shape[1] for prefix, tail in kept])
        width = int(lengths.max())
        cache = DynamicCache()
        for number, layer in enumerate(self.attended):
            parts = []
            for i, buffer in enumerate(layer.prefix):
                rows = [
                    torch.cat([buffer[self.prefixes.index(prefix), :, -prefix.length :], tail[number][i]], 1)
                    for prefix, tail in kept
                ]
                parts.append(torch.stack([_widened(row, width) for row in rows]))
            cache.update(parts[0], parts[1], number)
        return cache, (torch.arange(width)[None] >= width - lengths[:, None]).long()

    # a pass of one token for each row --------------------------------------------------------

    @contextmanager
    def decoding(self) -> Iterator[dict[str, Any]]:
        """The arguments of a forward pass of one token for each row, which it appends to the tails."""
        for row in self.rows:
            row.tail += 1
        self._masks.clear()
        self._places = self._places or self._rows_of_prefixes()
        AttentionInterface.register(DECODE_ATTENTION, self._attend)
        own = self.config._attn_implementation
        self.config._attn_implementation = DECODE_ATTENTION
        try:
            # a mask of four axes is handed on as it is, and not read here
            mask = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=self.attended[0].tail[0].device)
            yield {"attention_mask": mask, "past_key_values": Cache(layers=self.layers), "use_cache": True}
        finally:
            self.config._attn_implementation = own

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
        """Queries [R, H, 1, d] over the buffers of the module's layer; returns [R, 1, H, d]."""
        layer = self.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        rows, heads, _, size = query.shape
        scaled = query[:, :, 0] * (size**-0.5 if scaling is None else scaling)
        q = scaled.reshape(rows, key.shape[1], -1, size)
        (prompt_keys, prompt_values), (keys, values) = layer.prefix, layer.tail
        scores = torch.cat(
            [self._by_row(_product(self._by_prefix(q), prompt_keys.mT)), _product(q, keys.mT)], 3
        )
        scores.masked_fill_(self._hidden(sliding_window, prompt_keys, keys), -torch.inf)
        shared, own = scores.softmax(3).to(value.dtype).split([prompt_keys.shape[2], keys.shape[2]], 3)
        seen = self._by_row(_product(self._by_prefix(shared), prompt_values)) + _product(own, values)
        return seen.to(query.dtype).reshape(rows, 1, heads, size), None

    def _hidden(self, window: int | None, prompts: Tensor, tails: Tensor) -> Tensor:
        """The mask [R, 1, 1, L + T] of columns that a row does not look at."""
        if window not in self._masks:
            device, (long, wide) = prompts.device, (prompts.shape[2], tails.shape[2])
            length = torch.tensor([row.prefix.length for row in self.rows], device=device)[:, None]
            tail = torch.tensor([row.tail for row in self.rows], device=device)[:, None]
            # how many tokens a column is before the one that ends its buffer
            before, own = torch.arange(long, device=device).flip(0), torch.arange(wide, device=device).flip(0)
            hidden = torch.cat([before >= length, own >= tail], 1)
            if window is not None:
                hidden |= torch.cat([before + tail, own.expand(len(tail), -1)], 1) >= window
            self._masks[window] = hidden[:, None, None]
        return self._masks[window]

    def _by_prefix(self, x: Tensor) -> Tensor:
        """Rows [R, K, N, d] as [P, K, G * N, d], with zeros where a prompt has fewer rows than another."""
        assert self._places is not None
        entries, places, most = self._places
        padded = x.new_zeros(len(self.prefixes), most, *x.shape[1:])
        padded[entries, places] = x
        return padded.transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor) -> Tensor:
        """[P, K, G * N, d] as rows [R, K, N, d]."""
        assert self._places is not None
        entries, places, most = self._places
        by_place: Tensor = x.view(*x.shape[:2], most, -1, x.shape[3]).transpose(1, 2)
        return by_place[entries, places]

    def _rows_of_prefixes(self) -> tuple[Tensor, Tensor, int]:
        """The prompt of each row, its number among the rows of that prompt, and the most rows of a prompt."""
        entries = torch.tensor([self.prefixes.index(row.prefix) for row in self.rows])
        places = (entries[:, None] == entries).tril(-1).sum(1)
        device = self.attended[0].tail[0].device
        return entries.to(device), places.to(device), int(places.max()) + 1


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Products [A, K, M, N] of [A, K, M, d] and [A, K, d, N], summed and given in float32, as fused attention does."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return a.float() @ b.float()
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return product.view(*a.shape[:2], *product.shape[1:])


def is_attention(layer: Any) -> bool:
    """True when a layer of a cache holds keys and values, not states of linear attention."""
    return isinstance(layer, DynamicLayer)


def full_cache(config: Any) -> DynamicCache:
    """An empty cache for a text config in which layers of sliding windows keep every token."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if is_attention(layer) else layer for layer in cache.layers]
    return cache


def _widened(buffer: Tensor, width: int) -> Tensor:
    """A buffer [..., T, d] with zeros before it, up to that width."""
    return pad(buffer, (0, 0, width - buffer.shape[-2], 0))


def _stacked(buffer: Tensor, more: Tensor) -> Tensor:
    """Entries [A, K, T, d] and others of another width, in one buffer."""
    width = max(buffer.shape[2], more.shape[2])
    return torch.cat([_widened(buffer, width), _widened(more, width)])


def _selected(buffer: Tensor, entries: Sequence[int], width: int) -> Tensor:
    """Some entries of a buffer [A, K, T, d], of their last `width` columns."""
    return buffer[torch.tensor(entries, dtype=torch.long, device=buffer.device), :, buffer.shape[2] - width :]


def _states(layer: Any) -> list[tuple[Any, Any, Tensor]]:
    """List the tensors [R, ...] of a layer of linear attention: (holder, name or number, tensor)."""
    found: list[tuple[Any, Any, Tensor]] = []
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        if isinstance(states, dict):
            found += [(states, number, state) for number, state in states.items() if state is not None]
        elif states is not None:
            found.append((layer, name, states))
    return found


def _fill(own: Any, new: Any, *, append: bool) -> None:
    """Give a layer of linear attention the states of another one: behind its own, or in their place."""
    for (holder, name, state), (_, _, other) in zip(_states(own), _states(new), strict=True):
        value = torch.cat([state, other]) if append else other
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)
