"""Log-probabilities and entropies of tokens, from hidden states and the head, without holding all logits.

Logits of M tokens over V entries are the largest tensor of a training step (64 completions of 512
tokens over 152k entries take 20 GB in fp32). Here they exist a tile at a time, some rows over some of the
vocabulary, in forward and again in backward, where a tile is computed anew. Forward goes along the
vocabulary with a running maximum and running sums; backward finishes one slice of the vocabulary after
the other, so that the head's gradient is summed in fp32 for that slice alone. The results are those of
the plain computation up to rounding. A teacher's logits, for the KL over the whole vocabulary, are made tile by tile
too, from its hidden states and the same head.

Products of 16-bit numbers are rounded to 16 bits on a CPU before they are summed, and are fp32 on a GPU, where that
costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES, GPU_CHUNK_BYTES = 64 << 20, 512 << 20
"""Memory for what lives beside one tile: its logits, their exponentials, its slice of the head's gradient. A CPU's
caches are small; on a GPU the some 25 kernels of a smaller tile take as long to launch as its product takes to run."""
ROWS, GPU_ROWS = 1024, 4096
"""Most rows of a tile. With fewer, reading the head dominates: each tile reads its columns of it once."""


def chunk_bytes_of(*, gpu: bool) -> int:
    """Memory that `token_logprobs` takes beside its arguments, their gradients and numbers for each token."""
    return GPU_CHUNK_BYTES if gpu else CHUNK_BYTES


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned: Sequence[int] = (),
    chunk_bytes: int | None = None,
    teacher: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Log-probabilities [M] and entropies [M] (nats) of `targets` [M], in fp32.

    `hidden` [M, D] are the states that predict the targets and `head` [V, D] the output weights. The
    distribution is softmax(hidden @ head.T / temperature) over the entries that are not `banned`.
    The results carry gradients to `hidden` and `head`. None for `chunk_bytes` is what suits the device.

    With the states [M, D] of a `teacher`, which get no gradient, the third result is KL(teacher || this distribution)
    [M], where the teacher's distribution is made of its states in the same way.
    """
    gpu, given = hidden.device.type != "cpu", chunk_bytes
    most = chunk_bytes_of(gpu=gpu) if given is None else given
    rows = max(1, min(len(targets), GPU_ROWS if gpu else ROWS))
    slices = (
        2 if gpu else 1
    )  # of the head's gradient in fp32: what is summed, and on a GPU what is added to it
    tiles_at_once = 2 if teacher is None else 4
    columns = max(1, min(len(head), most // (4 * (tiles_at_once * rows + slices * head.shape[1]))))
    ids = sorted(banned)
    # on the device once: a copy for each tile would have the host wait for all that was begun before
    tiles = Tiles(
        rows, columns, 1.0 / temperature, ids, torch.tensor(ids, dtype=torch.long).to(hidden.device)
    )
    results: tuple[Tensor, ...] = _Tiled.apply(hidden, head, targets, tiles, teacher)  # type: ignore[no-untyped-call]
    return results


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
        """fp32 logits of some states [R, D] over the entries `columns` of `head`."""
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
    exp(logit - top) * (logit - top), and `chosen` the target's logit, 0 while no tile held it. `taught` are the top and
    the mass of a teacher's logits, and the sum of exp(its logit - its top) * (its logit - its top - (logit - top)).
    """

    top: Tensor
    mass: Tensor
    moment: Tensor
    chosen: Tensor
    taught: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def over(cls, tile: Tensor, targets: Tensor, teacher: Tensor | None = None) -> _Running:
        """One tile alone; its logits become logit - top in place. `targets` count from its first column. The tile of a
        `teacher` is used up."""
        top = tile.amax(-1)
        inside = (targets >= 0) & (targets < tile.shape[1])
        chosen = tile.gather(1, targets.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
        weights = tile.sub_(top[:, None]).exp()
        mass = weights.sum(-1)
        moment = weights.mul_(tile).sum(-1)
        if teacher is None:
            return cls(top, mass, moment, torch.where(inside, chosen, 0.0))
        del weights  # before the teacher's are made
        teacher_top = teacher.amax(-1)
        weights = teacher.sub_(teacher_top[:, None]).exp()
        taught = teacher_top, weights.sum(-1), weights.mul_(teacher.sub_(tile)).sum(-1)
        return cls(top, mass, moment, torch.where(inside, chosen, 0.0), taught)

    def joined(self, other: _Running) -> _Running:
        """Both slices of the vocabulary together."""
        top = torch.maximum(self.top, other.top)
        mass, moment = torch.zeros_like(top), torch.zeros_like(top)
        taught: tuple[Tensor, Tensor, Tensor] | None = None
        if self.taught is not None and other.taught is not None:
            taught = (
                torch.maximum(self.taught[0], other.taught[0]),
                torch.zeros_like(top),
                torch.zeros_like(top),
            )
        for part in (self, other):
            shift = (part.top - top).clamp(min=-1e3)  # a slice that is banned has the floor for its top
            mass += part.mass * shift.exp()
            moment += (part.moment + part.mass * shift) * shift.exp()
            if taught is not None and part.taught is not None:
                teacher_top, own_mass, own_gap = part.taught
                move = (teacher_top - taught[0]).clamp(min=-1e3)
                taught[1].add_(own_mass * move.exp())
                taught[2].add_((own_gap + own_mass * (move - shift)) * move.exp())
        return _Running(top, mass, moment, self.chosen + other.chosen, taught)


class _Tiled(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d H / d logits = -p * (log p + H);  d KL(q || p) / d logits = p - q."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, tiles: Tiles, teacher: Tensor | None
    ) -> tuple[Tensor, ...]:
        logp = torch.empty(len(targets), device=hidden.device)
        entropy, normaliser, kl, taught = (torch.empty_like(logp) for _ in range(4))
        ctx.whole = None
        for rows in _cuts(len(targets), tiles.rows):
            running: _Running | None = None
            for columns in _cuts(len(head), tiles.columns):
                tile = tiles.logits(hidden[rows], head, columns)
                other = None if teacher is None else tiles.logits(teacher[rows], head, columns)
                found = _Running.over(tile, targets[rows] - columns.start, other)
                running = found if running is None else running.joined(found)
                if tile.shape == (len(targets), len(head)):  # the only one: backward need not make it again
                    ctx.whole = tile.sub_(found.mass.log()[:, None])
                del tile, other  # before the next ones are made
            assert running is not None
            normaliser[rows] = running.top + running.mass.log()
            # less the top first: the sum of both is a larger number, and rounds more
            logp[rows] = running.chosen - running.top - running.mass.log()
            # not normaliser - sum(p * logit), which loses digits when the logits are large
            entropy[rows] = running.mass.log() - running.moment / running.mass
            if running.taught is not None:
                top, mass, gap = running.taught
                taught[rows] = top + mass.log()
                kl[rows] = gap / mass + running.mass.log() - mass.log()
        ctx.save_for_backward(hidden, head, targets, normaliser, entropy, teacher, taught)
        ctx.tiles = tiles
        ctx.set_materialize_grads(False)
        return (logp, entropy) if teacher is None else (logp, entropy, kl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normaliser, entropy, teacher, taught = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        grad_logp, grad_entropy, grad_kl = (*grads, None)[:3]
        if grad_logp is None:
            grad_logp = torch.zeros_like(entropy)
        of_p = grad_logp if grad_kl is None else grad_logp - grad_kl  # what is multiplied by -p
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
                    g = log_p.exp_().mul_(-of_p[rows, None])
                else:
                    g = log_p.exp()
                    log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                    g.mul_(log_p.add_(of_p[rows, None]).neg_())
                    del log_p
                if grad_kl is not None:
                    q = tiles.logits(teacher[rows], head, columns).sub_(taught[rows, None]).exp_()
                    g.sub_(q.mul_(grad_kl[rows, None]))
                    del q
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
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_head, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where the total is fp32 and the factors may be bf16."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, on a GPU in fp32. torch has no such product on a CPU."""
    if left.device.type != "cpu" and left.dtype.itemsize == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right
