"""A pack's sequences as batches: its prompts and its completions, cut out of the rows and put together again.

Layers that run a prompt once need both: attention (attention.py) lets each completion attend to its prompt, layers
with a recurrent state (linear_attention.py) start each completion from it. Sequences of similar length share a batch,
so that little of it is padding. Tensors here are [B, N, ...], as in a model's layers, and [B, K + N, ...] with the
prompts that run apart (`Pack.prefixes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.learner.pack import SEGMENTS_PER_GROUP

WASTE = 0.2
"""Largest share of a batch's attention that may be spent on padding."""
SMALL = 1 << 14
"""Pairs of query and key that cost less than one more batch."""


@dataclass(frozen=True)
class Sequences:
    """Batch of n sequences of a pack, at most S tokens long; r prompts belong to them, at most P tokens long."""

    index: Tensor
    """[n, S]: flat positions in the pack's B * N tokens, 0 past the end of a shorter sequence."""
    tokens: Tensor
    """[M]: flat positions in [n, S] of the tokens that exist."""
    positions: Tensor
    """[M]: their flat positions in the pack."""
    lengths: Tensor
    """[n]"""
    equal: bool
    """True if all sequences have one length."""
    prompts: Tensor
    """[n]: number of each sequence's prompt in the pack."""
    rows: Tensor
    """[n]: its number among the r prompts."""
    prompt_index: Tensor
    """[r, P]: flat positions of the prompts in the B * (K + N) tokens."""
    prompt_lengths: Tensor
    """[n]: length of each sequence's prompt."""

    def of(self, x: Tensor) -> Tensor:
        """Cut [n, S, ...] out of [B, N, ...]; past the end of a shorter sequence stands another token."""
        return _gather(x, self.index)


@dataclass(frozen=True)
class CompletionBatch:
    """Prompts and completions of a pack, in batches.

    Prompts are numbered in the order of the batches; prompts that run apart follow, in the order of `Pack.prefixes`.
    """

    prompts: tuple[Sequences, ...]
    completions: tuple[Sequences, ...]

    def split(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Split [B, N, ...] into prompts [r, P, ...] and completions [c, T, ...], batch by batch."""
        return [batch.of(x) for batch in self.prompts], [batch.of(x) for batch in self.completions]

    def merge(self, prompts: Sequence[Tensor], completions: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Join prompts [r, P, ...] and completions [c, T, ...] to [B, N, ...], with `shape` (B, N); padding is 0."""
        batches, values = (*self.prompts, *self.completions), (*prompts, *completions)
        flat = [
            v.flatten(0, 1) if len(b.tokens) == b.index.numel() else v.flatten(0, 1).index_select(0, b.tokens)
            for b, v in zip(batches, values, strict=True)
        ]
        out = values[0].new_zeros(shape[0] * shape[1], *values[0].shape[2:])
        out = out.index_copy(0, torch.cat([b.positions for b in batches]), torch.cat(flat))
        joined: Tensor = out.unflatten(0, tuple(shape))
        return joined

    def of_prompts(self, x: Tensor, prompts: Sequence[Tensor], completions: Sequences) -> Tensor:
        """Return the prompt of each completion of a batch: [c, P, ...] out of [B, K + N, ...], or of its `prompts`."""
        single = len(prompts) == 1 and len(prompts[0]) == 1  # one prompt in one batch
        by_prompt = prompts[0] if single else _gather(x, completions.prompt_index)
        return _repeated(by_prompt, completions.rows)

    def after_prompt(self, x: Tensor, completions: Sequences) -> Tensor:
        """Repeat the last values of prompts for each completion of a batch: [R, ...], by prompt, to [c, ...]."""
        return _repeated(x, completions.prompts)


def completion_batch(segments: Tensor, before: int = 0) -> CompletionBatch:
    """Return the batches of a pack's segments [B, K + N] (see `pack.Pack`), K = `before` of prompts that run apart."""
    device = segments.device
    # many small lookups follow: on a GPU each would wait for the device
    segments = segments.cpu()
    rows, width = segments.shape
    changes = torch.ones(rows, width, dtype=torch.bool)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = changes.flatten().nonzero()[:, 0]
    lengths = torch.cat([starts[1:], starts.new_tensor([rows * width])]) - starts
    kinds = segments.flatten()[starts]
    is_prompt, is_completion = kinds % SEGMENTS_PER_GROUP == 0, (kinds > 0) & (kinds % SEGMENTS_PER_GROUP > 0)
    groups = starts // width * SEGMENTS_PER_GROUP + kinds // SEGMENTS_PER_GROUP
    prompt_numbers = {group: number for number, group in enumerate(groups[is_prompt].tolist())}
    prompt_of = [prompt_numbers[group] for group in groups[is_completion].tolist()]
    starts_of, lengths_of = starts[is_prompt], lengths[is_prompt]

    runs_apart = starts_of % width < before
    inside, outside = ((~runs_apart).nonzero()[:, 0], runs_apart.nonzero()[:, 0])
    batches = _batches([0] * len(inside), lengths_of[inside].tolist())
    order = [int(inside[i]) for batch in batches for i in batch] + outside.tolist()
    number = {i: position for position, i in enumerate(order)}
    starts_of, lengths_of = starts_of[order], lengths_of[order]

    def sequences(first: Tensor, count: Tensor, numbers: Tensor) -> Sequences:
        """Return sequences by their flat starts and lengths [n] and the numbers [n] of their prompts."""
        index, real = _index(first - before * (first // width + 1), count)  # among the B * N
        unique_prompts, rows = numbers.unique(return_inverse=True)
        return Sequences(
            index=index.to(device),
            tokens=real.flatten().nonzero()[:, 0].to(device),
            positions=index[real].to(device),
            lengths=count.to(device),
            equal=bool(real.all()),
            prompts=numbers.to(device),
            rows=rows.to(device),
            prompt_index=_index(starts_of[unique_prompts], lengths_of[unique_prompts])[0].to(device),
            prompt_lengths=lengths_of[numbers].to(device),
        )

    cuts = torch.arange(len(inside)).split([len(batch) for batch in batches]) if batches else ()
    prompts = [sequences(starts_of[cut], lengths_of[cut], cut) for cut in cuts]
    numbers = torch.tensor([number[p] for p in prompt_of], dtype=torch.long)
    completion_starts, completion_lengths = starts[is_completion], lengths[is_completion]
    completions = [
        sequences(completion_starts[batch], completion_lengths[batch], numbers[batch])
        for batch in map(torch.tensor, _batches(lengths_of[numbers].tolist(), completion_lengths.tolist()))
    ]
    return CompletionBatch(tuple(prompts), tuple(completions))


def _batches(prompts: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences into batches by their lengths and their prompts' lengths; return sorted indices, batch by batch.

    From the longest to the shortest, each goes to the first batch with padding within `WASTE` or `SMALL`.
    """
    # members, longest, longest prompt, pairs without padding
    batches: list[tuple[list[int], int, int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], -prompts[i])):
        pairs = lengths[i] * (prompts[i] + lengths[i])
        for number, (members, longest, prompt, real) in enumerate(batches):
            prompt, real = max(prompt, prompts[i]), real + pairs
            padded = (len(members) + 1) * longest * (prompt + longest)
            if padded - real <= max(WASTE * padded, SMALL):
                batches[number] = ([*members, i], longest, prompt, real)
                break
        else:
            batches.append(([i], lengths[i], prompts[i], pairs))
    return [sorted(members) for members, *_ in batches]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return [n, S, ...], the positions `index` [n, S] of [B, N, ...]."""
    gathered: Tensor = x.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, tuple(index.shape))
    return gathered


def _repeated(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n] of x: [r, ...] to [n, ...]."""
    if len(x) == 1:  # a view: its backward is one sum
        return x.expand(len(rows), *x.shape[1:])
    return x.index_select(0, rows)


def _index(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return flat positions [n, S] of sequences, 0 past the end of one, and which of them exist."""
    offset = torch.arange(int(lengths.max()))
    real = offset < lengths[:, None]
    index: Tensor = (starts[:, None] + offset) * real
    return index, real
