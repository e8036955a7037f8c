"""Keys and values of the rows that are decoded together, in buffers that are made ahead of their tokens.

Rows come and go, token by token. Those of one prompt share its keys and values [1, K, L, d]; what follows them, sampled
tokens and observations, is a row's own [1, K, T, d]. A token's attention is computed over either part and the two are
put together by their log-sum-exps, so that a prompt is neither copied nor read once for each of its rows:

    prefix    [P, K, L, d]    one entry for each prompt in use; its columns `start` to `start + length` count
    tail      [R, K, T, d]    one entry for each row, from column 0

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
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

DECODE_ATTENTION = "mm_grpo_decode"
"""The attention of a forward pass of one token for each row."""
COLUMNS = 64
"""Columns of a new buffer; a full one is made twice as wide."""


@dataclass(eq=False)
class Prefix:
    """A prompt in the buffers: its entry, its first column, its length in tokens, and what still needs it."""

    entry: int
    start: int
    length: int
    uses: int = 0


@dataclass(eq=False)
class Row:
    """A row: the prompt that it follows, and how many tokens of its own are in the buffers."""

    prefix: Prefix
    tail: int = 0

    @property
    def length(self) -> int:
        return self.prefix.length + self.tail


Tail = list[tuple[Tensor, Tensor]]
"""Keys and values [K, T, d] of a row's own tokens, by layer."""


class _Layer(DynamicLayer):
    """The buffers of one layer of attention."""

    def __init__(self, owner: DecodeCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.prefix: list[Tensor] = []
        self.tail: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a token of each row, [R, K, 1, d]; what is attended to is in the buffers."""
        index = self.owner.written
        for buffer, new in zip(self.tail, (key_states, value_states), strict=True):
            if isinstance(index, int):
                buffer[: len(new), :, index] = new[:, :, 0]
            else:
                buffer[index[0], :, index[1]] = new[:, :, 0]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return max((row.length for row in self.owner.rows), default=0)


class DecodeCache:
    """The cache of `rows`, in the order of a forward pass. `config` is the model's text config."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rows: list[Row] = []
        self.prefixes: list[Prefix] = []
        self.layers: list[Any] = []
        self.attended: list[_Layer] = []
        self.linear: list[Any] = []
        self.written: int | tuple[Tensor, Tensor] = 0
        self._layout: _Layout | None = None

    # what comes and goes ---------------------------------------------------------------------

    def add_prompts(self, prefilled: Any, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Append `counts[i]` rows behind prompt i of a cache of prompts that are padded on the left."""
        if not self.layers:
            self.layers = [_Layer(self) if is_attention(layer) else layer for layer in prefilled.layers]
            self.attended = [layer for layer in self.layers if isinstance(layer, _Layer)]
            self.linear = [layer for layer in self.layers if not isinstance(layer, _Layer)]
        index = torch.repeat_interleave(torch.tensor(counts))
        for own, new in zip(self.layers, prefilled.layers, strict=True):
            if isinstance(own, _Layer):
                first, width = len(self.prefixes), new.keys.shape[2]
                parts = [new.keys, new.values]
                if first == 0:
                    own.prefix = parts
                    continue
                own.prefix = [_grown(b, first, first + len(lengths), width) for b in own.prefix]
                for buffer, part in zip(own.prefix, parts, strict=True):
                    buffer[first : first + len(lengths), :, :width] = part
            else:
                new.reorder_cache(index.to(_states(new)[0][2].device))
                if own is not new:
                    _fill(own, new, append=bool(self.rows))
        width = max(lengths)
        for length, count in zip(lengths, counts, strict=True):
            prefix = Prefix(len(self.prefixes), width - length, length, count)
            self.prefixes.append(prefix)
            self.rows += [Row(prefix) for _ in range(count)]
        self._make_room(len(self.rows), 1)
        self._layout = None

    def add_row(self, prefix: Prefix, tail: Tail) -> None:
        """Append a row behind a prompt that is still in use, with tokens of its own."""
        count, length = len(self.rows), tail[0][0].shape[1]
        self._make_room(count + 1, length)
        for layer, parts in zip(self.attended, tail, strict=True):
            for buffer, part in zip(layer.tail, parts, strict=True):
                buffer[count, :, :length] = part
        self.rows.append(Row(prefix, length))
        prefix.uses += 1
        self._layout = None

    def remove(self, gone: Sequence[int]) -> list[int]:
        """Remove rows; returns the former numbers of those that are left, in their new order.

        The last rows move to the places that become free, so that little is copied.
        """
        if not gone:
            return list(range(len(self.rows)))
        left = len(self.rows) - len(gone)
        removed = set(gone)
        holes = sorted(i for i in removed if i < left)
        movers = [i for i in range(left, len(self.rows)) if i not in removed]
        order = list(range(left))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            longest = max(self.rows[i].tail for i in movers)
            device = self.attended[0].tail[0].device
            target, source = torch.tensor(holes, device=device), torch.tensor(movers, device=device)
            for layer in self.attended:
                for buffer in layer.tail:
                    buffer[target, :, :longest] = buffer[source, :, :longest]
        for layer in self.linear:
            layer.reorder_cache(torch.tensor(order, dtype=torch.long, device=_states(layer)[0][2].device))
        ended = [self.rows[i] for i in gone]
        self.rows = [self.rows[i] for i in order]
        self._layout = None
        for row in ended:
            self.release(row.prefix)
        return order

    def release(self, prefix: Prefix) -> None:
        """One use less of a prompt; without one its entry goes to the last one's prompt."""
        prefix.uses -= 1
        if prefix.uses:
            return
        last = self.prefixes.pop()
        if last is not prefix:
            for layer in self.attended:
                for buffer in layer.prefix:
                    buffer[prefix.entry] = buffer[last.entry]
            last.entry = prefix.entry
            self.prefixes[last.entry] = last
        self._layout = None

    # a row that ended and goes on ------------------------------------------------------------

    def tail_of(self, number: int) -> Tail:
        """A copy of the keys and values of a row's own tokens."""
        length = self.rows[number].tail
        return [
            (layer.tail[0][number, :, :length].clone(), layer.tail[1][number, :, :length].clone())
            for layer in self.attended
        ]

    def joined(self, kept: Sequence[tuple[Prefix, Tail]]) -> tuple[DynamicCache, Tensor]:
        """Prompts with tails as a cache of rows that are padded on the left, with its mask [B, N]."""
        lengths = [prefix.length + tail[0][0].shape[1] for prefix, tail in kept]
        width = max(lengths)
        cache = DynamicCache()
        for number, layer in enumerate(self.attended):
            parts = []
            for i in (0, 1):
                buffer = layer.prefix[i]
                joined = buffer.new_zeros(len(kept), buffer.shape[1], width, buffer.shape[3])
                for b, ((prefix, tail), length) in enumerate(zip(kept, lengths, strict=True)):
                    start, middle = width - length, width - length + prefix.length
                    columns = slice(prefix.start, prefix.start + prefix.length)
                    joined[b, :, start:middle] = buffer[prefix.entry, :, columns]
                    joined[b, :, middle:] = tail[number][i]
                parts.append(joined)
            cache.update(parts[0], parts[1], number)
        mask = torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]
        return cache, mask.long()

    # a pass of one token for each row --------------------------------------------------------

    @contextmanager
    def decoding(self) -> Iterator[dict[str, Any]]:
        """The arguments of a forward pass of one token for each row, which it appends to the tails."""
        tails = [row.tail for row in self.rows]
        self._make_room(len(tails), max(tails) + 1)
        layout = self._layout = self._layout or _Layout(self)
        layout.begin(tails)
        if min(tails) == max(tails):
            self.written = tails[0]
        else:
            self.written = (layout.numbers, layout.tails)
        AttentionInterface.register(DECODE_ATTENTION, self._attend)
        own = self.config._attn_implementation
        self.config._attn_implementation = DECODE_ATTENTION
        try:
            # a mask of four axes is handed on as it is, and not read here
            mask = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=layout.device)
            yield {"attention_mask": mask, "past_key_values": Cache(layers=self.layers), "use_cache": True}
        finally:
            self.config._attn_implementation = own
        for row in self.rows:
            row.tail += 1

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
        layout, layer = self._layout, self.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        assert layout is not None
        rows, heads, _, size = query.shape
        kv_heads = key.shape[1]
        scaled = query[:, :, 0] * (size**-0.5 if scaling is None else scaling)
        q = scaled.reshape(rows, kv_heads, heads // kv_heads, size)
        prefix_mask, tail_mask = layout.masks(sliding_window)
        keys, values = (buffer[:rows, :, : layout.width] for buffer in layer.tail)
        own, own_sum = _attention(q, keys, values, tail_mask)
        keys, values = (buffer[: len(self.prefixes)] for buffer in layer.prefix)
        shared, shared_sum = _attention(layout.by_prefix(q), keys, values, prefix_mask)
        shared, shared_sum = layout.by_row(shared, q.shape), layout.by_row(shared_sum, (*q.shape[:3], 1))
        joined = torch.lerp(own, shared, torch.sigmoid(shared_sum - own_sum))
        return joined.to(query.dtype).reshape(rows, 1, heads, size), None

    def _make_room(self, rows: int, columns: int) -> None:
        """Buffers of at least so many rows and columns for the tails."""
        for layer in self.attended:
            if not layer.tail:
                _, heads, _, size = layer.prefix[0].shape
                layer.tail = [
                    buffer.new_zeros(rows, heads, max(columns, COLUMNS), size) for buffer in layer.prefix
                ]
            layer.tail = [_grown(buffer, len(self.rows), rows, columns) for buffer in layer.tail]


class _Layout:
    """The prompt of each row, and the masks of one pass; made anew when rows come or go."""

    def __init__(self, cache: DecodeCache) -> None:
        self.cache = cache
        self.device = cache.attended[0].prefix[0].device
        counts = [0] * len(cache.prefixes)
        places = []
        for row in cache.rows:
            places.append((row.prefix.entry, counts[row.prefix.entry]))
            counts[row.prefix.entry] += 1
        self.prompts, self.most = len(counts), max(counts)
        flat = [entry * self.most + place for entry, place in places]
        self.regular = flat == list(range(self.prompts * self.most))
        self.places = torch.tensor(flat, device=self.device)
        self.numbers = torch.arange(len(flat), device=self.device)
        self.entries = torch.tensor([entry for entry, _ in places], device=self.device)
        starts = torch.tensor([prefix.start for prefix in cache.prefixes], device=self.device)[:, None]
        self.ends = starts + torch.tensor([p.length for p in cache.prefixes], device=self.device)[:, None]
        columns = torch.arange(cache.attended[0].prefix[0].shape[2], device=self.device)
        self.seen = (columns >= starts) & (columns < self.ends)
        self.columns, self.full = columns, bool(self.seen.all())
        self.width, self.tails = 0, torch.zeros(len(flat), dtype=torch.long, device=self.device)
        self._masks: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}

    def begin(self, tails: Sequence[int]) -> None:
        """The pass that appends to tails of these lengths."""
        self.width = max(tails) + 1
        self.equal = min(tails) + 1 == self.width
        self.tails = torch.tensor(tails, device=self.device)
        if not self.equal or None not in self._masks:
            self._masks.clear()
        else:
            self._masks = {None: self._masks[None]}

    def masks(self, window: int | None) -> tuple[Tensor | None, Tensor | None]:
        """Masks of the rows: over the prefixes [P, 1, Q, L] and the tails [R, 1, 1, T]; None for no mask."""
        if window not in self._masks:
            own = torch.arange(self.width, device=self.device)
            tail = own <= self.tails[:, None]
            if window is None:
                prefix = None if self.full else self.seen[:, None, None]
                self._masks[None] = (prefix, None if self.equal else tail[:, None, None])
            else:
                # the token itself is at ends + tails, and sees what is less than a window before it
                first = self.ends[self.entries] + self.tails[:, None] - window
                tail &= own > self.tails[:, None] - window
                rows = torch.zeros(
                    self.prompts * self.most, len(self.columns), dtype=torch.bool, device=self.device
                )
                rows[self.places] = self.seen[self.entries] & (self.columns > first)
                self._masks[window] = (rows.view(self.prompts, 1, self.most, 1, -1), tail[:, None, None])
        return self._masks[window]

    def by_prefix(self, x: Tensor) -> Tensor:
        """Rows [R, K, N, d] as [P, K, G * N, d], with what is left over of rows that went."""
        _, heads, count, size = x.shape
        if not self.regular:
            padded = x.new_zeros(self.prompts * self.most, heads, count, size)
            padded[self.places] = x
            x = padded
        grouped = x.view(self.prompts, self.most, heads, count, size).transpose(1, 2)
        return grouped.reshape(self.prompts, heads, self.most * count, size)

    def by_row(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """[P, K, G * N, d] as rows [R, K, N, d]."""
        _, heads, count, size = shape
        rows = x.view(self.prompts, heads, self.most, count, size).transpose(1, 2)
        rows = rows.reshape(self.prompts * self.most, heads, count, size)
        return rows if self.regular else rows[self.places]


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of [B, K, Q, d] over [B, K, N, d], and the log-sum-exps [B, K, Q, 1] of scores, in float32.

    A query that may look at nothing gets some value, with a log-sum-exp that gives it no weight.
    """
    batch, heads, count, size = query.shape
    scores = _product(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).view(batch, heads, count, -1)
    if mask is not None:
        if mask.ndim == 5:  # [P, 1, G, 1, N]: a prompt's rows differ
            grouped = scores.view(batch, heads, mask.shape[2], -1, scores.shape[3])
            scores = grouped.masked_fill_(~mask, torch.finfo(scores.dtype).min).view_as(scores)
        else:
            scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    seen = _product(weights.to(values.dtype).flatten(0, 1), values.flatten(0, 1)).view(
        batch, heads, count, size
    )
    return seen.div_(total), highest + total.log_()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A batch of products, summed and given in float32, as fused attention does."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.device.type == "cuda":
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def is_attention(layer: Any) -> bool:
    """True when a layer of a cache holds keys and values, not states of linear attention."""
    return isinstance(layer, DynamicLayer)


def full_cache(config: Any) -> DynamicCache:
    """An empty cache for a text config in which layers of sliding windows keep every token."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if is_attention(layer) else layer for layer in cache.layers]
    return cache


def _grown(buffer: Tensor, used: int, rows: int, columns: int) -> Tensor:
    """The buffer, or one with at least so many rows and columns, of which `used` rows are filled."""
    if buffer.shape[0] >= rows and buffer.shape[2] >= columns:
        return buffer
    wide = buffer.shape[2] if buffer.shape[2] >= columns else max(columns, 2 * buffer.shape[2])
    high = buffer.shape[0] if buffer.shape[0] >= rows else max(rows, buffer.shape[0] * 3 // 2)
    grown = buffer.new_zeros(high, buffer.shape[1], wide, buffer.shape[3])
    grown[: len(buffer[:used]), :, : buffer.shape[2]] = buffer[:used]
    return grown


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
