"""A pack's sequences as batches: its prompts and its completions, cut out of the rows and put together again.

Layers that run a prompt once need both: attention (attention.py) to let each completion look at its prompt, layers
with a recurrent state (linear_attention.py) to start each completion from it. Sequences of like length share a batch,
so that little of it is padding. Tensors here are [B, N, ...], as a model's layers have them, and [B, K + N, ...] where
prompts that are run apart (`Pack.prefixes`) are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.learner.pack import SEGMENTS_PER_GROUP

WASTE = 0.2
"""Most of a batch's attention that may be spent on padding."""
SMALL = 1 << 14
"""Pairs of query and key that cost less than a batch of their own."""


@dataclass(frozen=True)
class Sequences:
    """A batch of n sequences of a pack, the longest of S tokens; r prompts belong to them, the longest of P tokens.

    `index` [n, S] are flat places in the pack's B * N tokens, 0 past the end of a shorter sequence; `kept` [M] the flat
    places in [n, S] of those that are there and `places` [M] theirs in the pack. `lengths` [n] are the sequences' own,
    `equal` says that they are alike. `prompts` [n] number the prompt of each in the pack, `rows` [n] among the r, of
    which `prompt_index` [r, P] are the places, with those of prompts that are run apart; `prompt_lengths` [n] are the
    tokens of each one's.
    """

    index: Tensor
    kept: Tensor
    places: Tensor
    lengths: Tensor
    equal: bool
    prompts: Tensor
    rows: Tensor
    prompt_index: Tensor
    prompt_lengths: Tensor

    def of(self, x: Tensor) -> Tensor:
        """[B, N, ...] to [n, S, ...]; past the end of a shorter sequence lies another token."""
        return _gather(x, self.index)


@dataclass(frozen=True)
class CompletionBatch:
    """The prompts and the completions of a pack, in batches; prompts are numbered in the order of theirs, those that
    are run apart after those of the rows, in the order of `Pack.prefixes`.
    """

    prompts: tuple[Sequences, ...]
    completions: tuple[Sequences, ...]

    def split(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """[B, N, ...] to prompts [r, P, ...] and completions [c, T, ...], batch by batch."""
        return [each.of(x) for each in self.prompts], [each.of(x) for each in self.completions]

    def merge(self, prompts: Sequence[Tensor], completions: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Prompts [r, P, ...] and completions [c, T, ...] to [B, N, ...], with `shape` (B, N); padding is 0."""
        batches, values = (*self.prompts, *self.completions), (*prompts, *completions)
        flat = [
            v.flatten(0, 1) if len(b.kept) == b.index.numel() else v.flatten(0, 1).index_select(0, b.kept)
            for b, v in zip(batches, values, strict=True)
        ]
        out = values[0].new_zeros(shape[0] * shape[1], *values[0].shape[2:])
        out = out.index_copy(0, torch.cat([b.places for b in batches]), torch.cat(flat))
        whole: Tensor = out.unflatten(0, tuple(shape))
        return whole

    def of_prompts(self, x: Tensor, prompts: Sequence[Tensor], own: Sequences) -> Tensor:
        """The prompts' tokens of each completion of a batch: of [B, K + N, ...], cut into `prompts`, to [c, P, ...]."""
        alone = len(prompts) == 1 and len(prompts[0]) == 1  # one prompt in one batch
        found = prompts[0] if alone else _gather(x, own.prompt_index)
        return _repeated(found, own.rows)

    def after_prompt(self, x: Tensor, own: Sequences) -> Tensor:
        """Repeat prompts' last values for each completion of a batch: by number of the prompt [R, ...] to [c, ...]."""
        return _repeated(x, own.prompts)


def completion_batch(segments: Tensor, before: int = 0) -> CompletionBatch:
    """The batches of a pack's segments [B, K + N] (see `pack.Pack`), where the first K = `before` are of prompts that
    are run apart."""
    device = segments.device
    segments = segments.cpu()  # many small questions
    rows, width = segments.shape
    changes = torch.ones(rows, width, dtype=torch.bool)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = changes.flatten().nonzero()[:, 0]
    lengths = torch.cat([starts[1:], starts.new_tensor([rows * width])]) - starts
    kinds = segments.flatten()[starts]
    is_prompt, is_completion = kinds % SEGMENTS_PER_GROUP == 0, (kinds > 0) & (kinds % SEGMENTS_PER_GROUP > 0)
    groups = starts // width * SEGMENTS_PER_GROUP + kinds // SEGMENTS_PER_GROUP
    place_of = {group: place for place, group in enumerate(groups[is_prompt].tolist())}
    prompt_of = [place_of[group] for group in groups[is_completion].tolist()]
    starts_of, lengths_of = starts[is_prompt], lengths[is_prompt]

    apart = starts_of % width < before
    inside, outside = ((~apart).nonzero()[:, 0], apart.nonzero()[:, 0])
    batches = _batches([0] * len(inside), lengths_of[inside].tolist())
    order = [int(inside[i]) for batch in batches for i in batch] + outside.tolist()
    number = {i: place for place, i in enumerate(order)}
    starts_of, lengths_of = starts_of[order], lengths_of[order]

    def sequences(first: Tensor, count: Tensor, numbers: Tensor) -> Sequences:
        """Sequences by their flat starts and lengths [n] and the numbers [n] of their prompts."""
        index, real = _index(first - before * (first // width + 1), count)  # among the B * N
        each, rows = numbers.unique(return_inverse=True)
        return Sequences(
            index=index.to(device),
            kept=real.flatten().nonzero()[:, 0].to(device),
            places=index[real].to(device),
            lengths=count.to(device),
            equal=bool(real.all()),
            prompts=numbers.to(device),
            rows=rows.to(device),
            prompt_index=_index(starts_of[each], lengths_of[each])[0].to(device),
            prompt_lengths=lengths_of[numbers].to(device),
        )

    cuts = torch.arange(len(inside)).split([len(batch) for batch in batches]) if batches else ()
    prompts = [sequences(starts_of[own], lengths_of[own], own) for own in cuts]
    numbers = torch.tensor([number[p] for p in prompt_of], dtype=torch.long)
    own_starts, own_lengths = starts[is_completion], lengths[is_completion]
    completions = [
        sequences(own_starts[own], own_lengths[own], numbers[own])
        for own in map(torch.tensor, _batches(lengths_of[numbers].tolist(), own_lengths.tolist()))
    ]
    return CompletionBatch(tuple(prompts), tuple(completions))


def _batches(prompts: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences into batches, by the lengths of their prompts and their own; in each they keep their order.

    From the longest to the shortest, each goes to the first batch whose padding stays within `WASTE` or `SMALL`.
    """
    # members, longest, longest prompt, pairs without padding
    found: list[tuple[list[int], int, int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], -prompts[i])):
        pairs = lengths[i] * (prompts[i] + lengths[i])
        for place, (members, longest, prompt, real) in enumerate(found):
            prompt, real = max(prompt, prompts[i]), real + pairs
            padded = (len(members) + 1) * longest * (prompt + longest)
            if padded - real <= max(WASTE * padded, SMALL):
                found[place] = ([*members, i], longest, prompt, real)
                break
        else:
            found.append(([i], lengths[i], prompts[i], pairs))
    return [sorted(members) for members, *_ in found]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """The places `index` [n, S] of [B, N, ...]: [n, S, ...]."""
    gathered: Tensor = x.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, tuple(index.shape))
    return gathered


def _repeated(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [n] of x: [r, ...] to [n, ...]."""
    if len(x) == 1:  # backward of the view is one sum
        return x.expand(len(rows), *x.shape[1:])
    return x.index_select(0, rows)


def _index(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Flat places [n, S] of sequences, 0 past the end of one, and which are there."""
    place = torch.arange(int(lengths.max()))
    real = place < lengths[:, None]
    index: Tensor = (starts[:, None] + place) * real
    return index, real
