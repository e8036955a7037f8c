"""Log-probabilities and entropies of tokens, from hidden states and the head, without holding all logits.

Logits of M tokens over V entries are the largest tensor of a training step (64 completions of 512
tokens over 152k entries take 20 GB in fp32). Here they exist a tile at a time, some rows over some of the
vocabulary, in forward and again in backward, where a tile is computed anew. Forward goes along the
vocabulary with a running maximum and running sums; backward finishes one slice of the vocabulary after
the other, so that the head's gradient is summed in fp32 for that slice alone. The results are those of
the plain computation up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20
"""Memory for what lives beside one tile: its logits, their exponentials, its slice of the head's gradient."""
ROWS = 1024
"""Most rows of a tile. With fewer, reading the head dominates: each tile reads its columns of it once."""


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned: Sequence[int] = (),
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [M] and entropies [M] (nats) of `targets` [M], in fp32.

    `hidden` [M, D] are the states that predict the targets and `head` [V, D] the output weights. The
    distribution is softmax(hidden @ head.T / temperature) over the entries that are not `banned`.
    Both results carry gradients to `hidden` and `head`.
    """
    rows = max(1, min(len(targets), ROWS))
    columns = max(1, min(len(head), chunk_bytes // (4 * (2 * rows + head.shape[1]))))
    tiles = Tiles(rows, columns, 1.0 / temperature, tuple(banned))
    results: tuple[Tensor, Tensor] = _Tiled.apply(hidden, head, targets, tiles)  # type: ignore[no-untyped-call]
    return results


@dataclass(frozen=True)
class Tiles:
    """Chunks of the logits [M, V], and what is done to each: times `scale`, `banned` entries out."""

    rows: int
    columns: int
    scale: float
    banned: tuple[int, ...]

    def logits(self, hidden: Tensor, head: Tensor, columns: slice) -> Tensor:
        """fp32 logits of some states [R, D] over the entries `columns` of `head`."""
        logits = (hidden @ head[columns].T).float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        # a finite floor: its probability is exactly 0 and 0 * floor is 0, where 0 * -inf would be NaN
        return self.ban(logits, columns, torch.finfo(torch.float32).min)

    def ban(self, tile: Tensor, columns: slice, value: float) -> Tensor:
        """Put `value` in the banned entries of a tile, in place."""
        inside = [b - columns.start for b in self.banned if columns.start <= b < columns.stop]
        if inside:
            tile.index_fill_(1, torch.tensor(inside, device=tile.device), value)
        return tile


def _cuts(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


@dataclass
class _Running:
    """Running sums of each row [R] over a slice of the vocabulary.

    `top` is the largest logit so far, `mass` the sum of exp(logit - top), `moment` that of
    exp(logit - top) * (logit - top), and `chosen` the target's logit, 0 while no tile held it.
    """

    top: Tensor
    mass: Tensor
    moment: Tensor
    chosen: Tensor

    @classmethod
    def over(cls, tile: Tensor, targets: Tensor) -> _Running:
        """One tile alone; its logits become logit - top in place. `targets` count from its first column."""
        top = tile.amax(-1)
        inside = (targets >= 0) & (targets < tile.shape[1])
        chosen = tile.gather(1, targets.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
        weights = tile.sub_(top[:, None]).exp()
        mass = weights.sum(-1)
        moment = weights.mul_(tile).sum(-1)
        return cls(top, mass, moment, torch.where(inside, chosen, 0.0))

    def joined(self, other: _Running) -> _Running:
        """Both slices of the vocabulary together."""
        top = torch.maximum(self.top, other.top)
        mass, moment = torch.zeros_like(top), torch.zeros_like(top)
        for part in (self, other):
            shift = (part.top - top).clamp(min=-1e3)  # a slice that is banned has the floor for its top
            mass += part.mass * shift.exp()
            moment += (part.moment + part.mass * shift) * shift.exp()
        return _Running(top, mass, moment, self.chosen + other.chosen)


class _Tiled(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d H / d logits = -p * (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, tiles: Tiles
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(len(targets), device=hidden.device)
        entropy, normaliser = torch.empty_like(logp), torch.empty_like(logp)
        ctx.whole = None
        for rows in _cuts(len(targets), tiles.rows):
            running: _Running | None = None
            for columns in _cuts(len(head), tiles.columns):
                tile = tiles.logits(hidden[rows], head, columns)
                found = _Running.over(tile, targets[rows] - columns.start)
                running = found if running is None else running.joined(found)
                if tile.shape == (len(targets), len(head)):  # the only one: backward need not make it again
                    ctx.whole = tile.sub_(found.mass.log()[:, None])
                del tile  # before the next one is made
            assert running is not None
            normaliser[rows] = running.top + running.mass.log()
            # less the top first: the sum of both is a larger number, and rounds more
            logp[rows] = running.chosen - running.top - running.mass.log()
            # not normaliser - sum(p * logit), which loses digits when the logits are large
            entropy[rows] = running.mass.log() - running.moment / running.mass
        ctx.save_for_backward(hidden, head, targets, normaliser, entropy)
        ctx.tiles = tiles
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normaliser, entropy = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        grad_logp, grad_entropy = grads
        if grad_logp is None:
            grad_logp = torch.zeros_like(entropy)
        kept, ctx.whole = ctx.whole, None  # it is used up here; a second backward makes it anew
        # sums over tiles are fp32: bf16 sums of many would lose the small ones
        grad_hidden = torch.zeros(hidden.shape, device=hidden.device) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for columns in _cuts(len(head), tiles.columns):
            slice_grad = None if grad_head is None else grad_head[columns].float()  # itself, where it is fp32
            for rows in _cuts(len(targets), tiles.rows):
                if kept is None:
                    log_p = tiles.logits(hidden[rows], head, columns).sub_(normaliser[rows, None])
                else:
                    log_p, kept = kept, None
                if grad_entropy is None:
                    g = log_p.exp_().mul_(-grad_logp[rows, None])
                else:
                    g = log_p.exp()
                    log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                    g.mul_(log_p.add_(grad_logp[rows, None]).neg_())
                    del log_p
                places = targets[rows] - columns.start
                inside = (places >= 0) & (places < g.shape[1])
                own = torch.where(inside, grad_logp[rows], 0.0)
                g.scatter_add_(1, places.clamp(0, g.shape[1] - 1)[:, None], own[:, None])
                g = tiles.ban(g, columns, 0.0).mul_(tiles.scale).to(hidden.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], g, head[columns])
                if slice_grad is not None:
                    _add_product(slice_grad, g.T, hidden[rows])
                del g  # before the next tile is made
            if grad_head is not None and slice_grad is not None and head.dtype != slice_grad.dtype:
                grad_head[columns] = slice_grad
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_head, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where the total is fp32 and the factors may be bf16."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
