"""Log-probabilities and entropies of tokens, from hidden states and the head, without holding all logits.

Logits of M tokens over V entries are the largest tensor of a training step (64 completions of 512 tokens over 152k
entries take 20 GB in fp32). Here they exist a tile at a time, some rows over some of the vocabulary; backward computes
each tile again. Forward goes along the vocabulary with a running maximum and running sums. Backward finishes one slice
of the vocabulary after the other, so that the head's gradient is summed in fp32 for one slice at a time. The results
equal the plain computation up to rounding. For the KL from another distribution q over the whole vocabulary, q's logits
are made tile by tile too, from q's hidden states and the same head.

Products of 16-bit numbers are rounded to 16 bits on a CPU before they are summed, and are fp32 on a GPU at no cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES, GPU_CHUNK_BYTES = 64 << 20, 512 << 20
"""Memory for what lives beside one tile: its logits, their exponentials, its slice of the head's gradient. A CPU's
caches are small; on a GPU the some 25 kernels of a smaller tile take as long to launch as its product takes to run."""
ROWS, GPU_ROWS = 1024, 4096
"""Limit on the rows of a tile. With fewer, reading the head dominates: each tile reads its columns of it once."""


class PackResult(NamedTuple):
    """Values [M] of tokens in fp32, in nats, with gradients."""

    logp: Tensor
    entropy: Tensor
    kl: Tensor | None = None
    """KL(q || the policy); None without a distribution q."""

    def split(self, counts: Sequence[int]) -> list[PackResult]:
        """Cut into results of `counts` tokens."""
        parts = [[None] * len(counts) if values is None else values.split(counts) for values in self]
        return [PackResult(*part) for part in zip(*parts, strict=True)]


def chunk_bytes_of(*, gpu: bool) -> int:
    """Return the bytes that `token_logprobs` takes beside its arguments, their gradients and numbers for each token."""
    return GPU_CHUNK_BYTES if gpu else CHUNK_BYTES


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned: Sequence[int] = (),
    chunk_bytes: int | None = None,
    q_hidden: Tensor | None = None,
) -> PackResult:
    """Return log-probabilities and entropies of `targets` [M].

    `hidden` [M, D] are the states that predict the targets and `head` [V, D] the output weights. The
    distribution is softmax(hidden @ head.T / temperature) over the entries that are not `banned`.
    The results carry gradients to `hidden` and `head`. None for `chunk_bytes` is what suits the device.

    `q_hidden` [M, D] are states of a second distribution q, made of them in the same way, which get no gradient. With
    them the result has the KL from q.
    """
    gpu = hidden.device.type != "cpu"
    limit = chunk_bytes_of(gpu=gpu) if chunk_bytes is None else chunk_bytes
    rows = max(1, min(len(targets), GPU_ROWS if gpu else ROWS))
    # slices of the head's gradient in fp32: the sum, and on a GPU what is added to it
    slices = 2 if gpu else 1
    tiles_at_once = 2 if q_hidden is None else 4
    columns = max(1, min(len(head), limit // (4 * (tiles_at_once * rows + slices * head.shape[1]))))
    ids = sorted(banned)
    # on the device once, because a copy for each tile would make the host wait for all earlier work
    tiles = Tiles(
        rows, columns, 1.0 / temperature, ids, torch.tensor(ids, dtype=torch.long).to(hidden.device)
    )
    return PackResult(*_Tiled.apply(hidden, head, targets, tiles, q_hidden))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Tiles:
    """Chunks of the logits [M, V], and what is done to each: times `scale`, `banned` entries (in order) out.

    `places` are the banned ones again, on the logits' device.
    """

    rows: int
    columns: int
    scale: float
    banned: Sequence[int]
    places: Tensor

    def logits(self, hidden: Tensor, head: Tensor, columns: slice) -> Tensor:
        """Return fp32 logits of some states [R, D] over the entries `columns` of `head`."""
        logits = _product(hidden, head[columns].T).float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        # a finite floor: its probability is exactly 0 and 0 * floor is 0, where 0 * -inf would be NaN
        return self.ban(logits, columns, torch.finfo(torch.float32).min)

    def ban(self, tile: Tensor, columns: slice, value: float) -> Tensor:
        """Put `value` in the banned entries of a tile, in place."""
        first, end = (bisect_left(self.banned, edge) for edge in (columns.start, columns.stop))
        if first < end:
            tile.index_fill_(1, self.places[first:end] - columns.start, value)
        return tile


def _cuts(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


@dataclass
class _Running:
    """Running sums of each row [R] over a slice of the vocabulary.

    `top` is the largest logit so far, `mass` the sum of exp(logit - top), `moment` that of
    exp(logit - top) * (logit - top), and `chosen` the target's logit, 0 until a tile has it. `q` are the top and the
    mass of q's logits, and the sum of exp(q_logit - q_top) * (q_logit - q_top - (logit - top)); None without q.
    """

    top: Tensor
    mass: Tensor
    moment: Tensor
    chosen: Tensor
    q: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def over(cls, tile: Tensor, targets: Tensor, q_tile: Tensor | None = None) -> _Running:
        """Return the sums of one tile; its logits become logit - top in place. `targets` count from its first column.

        The contents of `q_tile` are lost.
        """
        top = tile.amax(-1)
        inside = (targets >= 0) & (targets < tile.shape[1])
        chosen = tile.gather(1, targets.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
        weights = tile.sub_(top[:, None]).exp()
        mass = weights.sum(-1)
        moment = weights.mul_(tile).sum(-1)
        if q_tile is None:
            return cls(top, mass, moment, torch.where(inside, chosen, 0.0))
        del weights  # before the weights of q are made, so that one tile of them exists at a time
        q_top = q_tile.amax(-1)
        weights = q_tile.sub_(q_top[:, None]).exp()
        q = q_top, weights.sum(-1), weights.mul_(q_tile.sub_(tile)).sum(-1)
        return cls(top, mass, moment, torch.where(inside, chosen, 0.0), q)

    def joined(self, other: _Running) -> _Running:
        """Return the sums over both slices of the vocabulary."""
        top = torch.maximum(self.top, other.top)
        mass, moment = torch.zeros_like(top), torch.zeros_like(top)
        q: tuple[Tensor, Tensor, Tensor] | None = None
        if self.q is not None and other.q is not None:
            q = torch.maximum(self.q[0], other.q[0]), torch.zeros_like(top), torch.zeros_like(top)
        for part in (self, other):
            shift = (part.top - top).clamp(min=-1e3)  # the top of a slice that is banned whole is the floor
            mass += part.mass * shift.exp()
            moment += (part.moment + part.mass * shift) * shift.exp()
            if q is not None and part.q is not None:
                part_top, part_mass, part_gap = part.q
                q_shift = (part_top - q[0]).clamp(min=-1e3)
                q[1].add_(part_mass * q_shift.exp())
                q[2].add_((part_gap + part_mass * (q_shift - shift)) * q_shift.exp())
        return _Running(top, mass, moment, self.chosen + other.chosen, q)


class _Tiled(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d H / d logits = -p * (log p + H);  d KL(q || p) / d logits = p - q."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, tiles: Tiles, q_hidden: Tensor | None
    ) -> tuple[Tensor, ...]:
        logp = torch.empty(len(targets), device=hidden.device)
        entropy, normaliser, kl, q_normaliser = (torch.empty_like(logp) for _ in range(4))
        ctx.only_tile = None
        for rows in _cuts(len(targets), tiles.rows):
            running: _Running | None = None
            for columns in _cuts(len(head), tiles.columns):
                tile = tiles.logits(hidden[rows], head, columns)
                q_tile = None if q_hidden is None else tiles.logits(q_hidden[rows], head, columns)
                sums = _Running.over(tile, targets[rows] - columns.start, q_tile)
                running = sums if running is None else running.joined(sums)
                if tile.shape == (len(targets), len(head)):  # the only tile: backward need not make it again
                    ctx.only_tile = tile.sub_(sums.mass.log()[:, None])
                del tile, q_tile  # before the next ones are made
            assert running is not None
            normaliser[rows] = running.top + running.mass.log()
            # minus the top first: normaliser is a larger number, and rounds more
            logp[rows] = running.chosen - running.top - running.mass.log()
            # not normaliser - sum(p * logit), which loses digits when the logits are large
            entropy[rows] = running.mass.log() - running.moment / running.mass
            if running.q is not None:
                top, mass, gap = running.q
                q_normaliser[rows] = top + mass.log()
                kl[rows] = gap / mass + running.mass.log() - mass.log()
        ctx.save_for_backward(hidden, head, targets, normaliser, entropy, q_hidden, q_normaliser)
        ctx.tiles = tiles
        ctx.set_materialize_grads(False)
        return (logp, entropy) if q_hidden is None else (logp, entropy, kl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normaliser, entropy, q_hidden, q_normaliser = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        grad_logp, grad_entropy, grad_kl = (*grads, None)[:3]
        if grad_logp is None:
            grad_logp = torch.zeros_like(entropy)
        grad_p = grad_logp if grad_kl is None else grad_logp - grad_kl  # the factor of -p
        # changed in place below; a second backward makes a new one
        only_tile, ctx.only_tile = ctx.only_tile, None
        # sums over tiles are fp32: bf16 sums of many would lose the small ones
        grad_hidden = torch.zeros(hidden.shape, device=hidden.device) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for columns in _cuts(len(head), tiles.columns):
            # `float` returns a view of an fp32 head's gradient and a copy of a bf16 one, which is written back below
            slice_grad = None if grad_head is None else grad_head[columns].float()
            for rows in _cuts(len(targets), tiles.rows):
                if only_tile is None:
                    log_p = tiles.logits(hidden[rows], head, columns).sub_(normaliser[rows, None])
                else:
                    log_p, only_tile = only_tile, None
                if grad_entropy is None:
                    g = log_p.exp_().mul_(-grad_p[rows, None])
                else:
                    g = log_p.exp()
                    log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                    g.mul_(log_p.add_(grad_p[rows, None]).neg_())
                    del log_p
                if grad_kl is not None:
                    q = tiles.logits(q_hidden[rows], head, columns).sub_(q_normaliser[rows, None]).exp_()
                    g.sub_(q.mul_(grad_kl[rows, None]))
                    del q
                places = targets[rows] - columns.start
                inside = (places >= 0) & (places < g.shape[1])
                onehot = torch.where(inside, grad_logp[rows], 0.0)
                g.scatter_add_(1, places.clamp(0, g.shape[1] - 1)[:, None], onehot[:, None])
                g = tiles.ban(g, columns, 0.0).mul_(tiles.scale).to(hidden.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], g, head[columns])
                if slice_grad is not None:
                    _add_product(slice_grad, g.T, hidden[rows])
                del g  # before the next tile is made
            if grad_head is not None and slice_grad is not None and head.dtype != slice_grad.dtype:
                grad_head[columns] = slice_grad
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_head, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to an fp32 total; the factors may be bf16."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, on a GPU in fp32. torch has no such product on a CPU."""
    if left.device.type != "cpu" and left.dtype.itemsize == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right
