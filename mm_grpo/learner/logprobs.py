"""Log-probabilities of chosen tokens without ever holding all logits.

Logits of M tokens over V entries are the largest tensor of a training step (64 completions of 512
tokens over 152k entries take 20 GB in fp32). Only a chunk of rows exists at a time here, in forward and
again in backward, where it is computed anew. The result and its gradients are those of the plain
computation up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Size of one chunk of fp32 logits."""


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
    rows = max(1, chunk_bytes // (4 * head.shape[0]))
    mask = torch.tensor(sorted(banned), dtype=torch.long, device=head.device)
    results: tuple[Tensor, Tensor] = _Chunked.apply(hidden, head, targets, mask, 1.0 / temperature, rows)  # type: ignore[no-untyped-call]
    return results


def _logits(hidden: Tensor, head: Tensor, banned: Tensor, scale: float) -> Tensor:
    logits = (hidden @ head.T).float().mul_(scale)
    # a finite floor: its probability is exactly 0 and 0 * floor is 0, where 0 * -inf would be NaN
    return logits.index_fill_(1, banned, torch.finfo(torch.float32).min)


def _chunks(total: int, rows: int) -> Iterator[slice]:
    for start in range(0, total, rows):
        yield slice(start, min(start + rows, total))


class _Chunked(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d H / d logits = -p * (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, banned: Tensor, scale: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        logp = torch.empty(count, device=hidden.device)
        entropy, normaliser = torch.empty_like(logp), torch.empty_like(logp)
        for part in _chunks(count, rows):
            logits = _logits(hidden[part], head, banned, scale)
            lse = logits.logsumexp(-1)
            logp[part] = logits.gather(1, targets[part, None])[:, 0] - lse
            normaliser[part] = lse
            # not lse - sum(p * logits), which loses digits when the logits are large
            log_p = logits.sub_(lse[:, None])
            entropy[part] = -(log_p.exp().mul_(log_p)).sum(-1)
        ctx.save_for_backward(hidden, head, targets, banned, normaliser, entropy)
        ctx.scale, ctx.rows = scale, rows
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, banned, normaliser, entropy = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # summed over chunks in fp32: bf16 sums of many chunks would lose the small ones
        grad_head = torch.zeros(head.shape, device=head.device) if need_head else None
        for part in _chunks(len(targets), ctx.rows):
            log_p = _logits(hidden[part], head, banned, ctx.scale) - normaliser[part, None]
            p = log_p.exp()
            g = p * (-grad_logp[part, None] - grad_entropy[part, None] * (log_p + entropy[part, None]))
            g.scatter_add_(1, targets[part, None], grad_logp[part, None])
            g = g.mul_(ctx.scale).index_fill_(1, banned, 0.0).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = g @ head
            if grad_head is not None:
                grad_head += g.T @ hidden[part]
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None
