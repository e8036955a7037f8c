"""A pack's completions as a batch: rows of tokens cut into prompts and completions, and put together again.

Layers that run a prompt once need both: attention (attention.py) to let each completion look at its prompt, layers
with a recurrent state (linear_attention.py) to start each completion from it. Tensors here are [B, N, ...], one entry
for each place of the pack's rows, as a model's layers have them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.learner.pack import PROMPT


@dataclass(frozen=True)
class CompletionBatch:
    """Where the C completions of a pack's B rows lie, the longest of T tokens.

    `prompt` is the longest prompt, P tokens, and `lengths` [B] are those of all; `equal` says that they are alike.
    `rows` [C] name each completion's row; `index` [C, T] are flat places in the B * N tokens (0 where a completion is
    shorter than T), `kept` [M] the flat places in [C, T] of those that are there. `even` says that there is one row of
    completions of one length without padding, where all of this is a matter of views.
    """

    prompt: int
    lengths: Tensor
    equal: bool
    rows: Tensor
    index: Tensor
    kept: Tensor
    even: bool

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, ...] to prompts [B, P, ...] and completions [C, T, ...]; past a shorter one lie other tokens."""
        if self.even:  # split, for its backward is one cat, where that of two slices is two zeroed copies
            prompts, rest = x.split((self.prompt, x.shape[1] - self.prompt), 1)
            return prompts, rest.squeeze(0).unflatten(0, tuple(self.index.shape))
        flat = x.flatten(0, 1).index_select(0, self.index.flatten())
        return x[:, : self.prompt], flat.unflatten(0, tuple(self.index.shape))

    def merge(self, prompts: Tensor, completions: Tensor, width: int) -> Tensor:
        """Prompts [B, P, ...] and completions [C, T, ...] to [B, N, ...] with N = `width`; padding is unspecified."""
        flat = completions.flatten(0, 1)
        if self.even:
            return torch.cat([prompts, flat[None]], 1)
        # prompts first; places past a short prompt hold nonsense until the completions are laid over them
        rest = prompts.new_zeros(len(prompts), width - self.prompt, *prompts.shape[2:])
        out = torch.cat([prompts, rest], 1)
        places = self.index.flatten().index_select(0, self.kept)
        out = out.flatten(0, 1).index_copy(0, places, flat.index_select(0, self.kept))
        whole: Tensor = out.unflatten(0, (len(prompts), width))
        return whole

    def of_prompt(self, x: Tensor) -> Tensor:
        """Of each completion what its prompt has: [B, ...] to [C, ...]."""
        if len(x) == 1:  # backward of the view is one sum
            return x.expand(len(self.rows), *x.shape[1:])
        return x.index_select(0, self.rows)


def completion_batch(segments: Tensor) -> CompletionBatch:
    """The completions of a pack's segments [B, N] (see `pack.Pack`), which holds one at least."""
    device = segments.device
    segments = segments.cpu()  # many small questions
    rows, width = segments.shape
    lengths = (segments == PROMPT).sum(1)
    longest = int(lengths.max())
    pairs = [(b, k) for b in range(rows) for k in range(1, int(segments[b].max()) + 1)]
    places = [(segments[b] == k).nonzero()[:, 0] + b * width for b, k in pairs]
    tokens = max(len(p) for p in places)
    index = torch.zeros(len(pairs), tokens, dtype=torch.long)
    real = torch.zeros(len(pairs), tokens, dtype=torch.bool)
    for i, place in enumerate(places):
        index[i, : len(place)] = place
        real[i, : len(place)] = True
    return CompletionBatch(
        prompt=longest,
        lengths=lengths.to(device),
        equal=bool((lengths == longest).all()),
        rows=torch.tensor([b for b, _ in pairs]).to(device),
        index=index.to(device),
        kept=real.flatten().nonzero()[:, 0].to(device),
        even=rows == 1 and index.numel() + longest == width,
    )
