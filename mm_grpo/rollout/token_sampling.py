"""Token sampling: each row draws from its own noise, by the cumulative probabilities of its distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

if TYPE_CHECKING:
    from mm_grpo.rollout.engine import Sampling


PART_BYTES = 256 << 20
"""Memory that sampling may take in addition to the logits: rows are sampled in parts."""
LOGIT_BYTES = 48
"""Most bytes that a logit takes: truncation sorts a copy with its indices and sums it up."""


def uniforms(seed: int, count: int) -> Tensor:
    """Return a row's noise [T]: one number in [0, 1) per token, fixed by `seed`."""
    # on the CPU, where a longer row begins with the same numbers as a shorter one
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def sample(
    logits: Tensor,
    noise: Tensor,
    sampling: Sampling,
    banned: list[int],
    context: Sequence[Sequence[int]] | None,
) -> tuple[Tensor, Tensor]:
    """Return tokens [R] and their log-probabilities [R], in float32, under the distribution that they are drawn from.

    `logits` [R, V] may be overwritten; `noise` [R] is for this token; `banned` ids are never drawn. `context` holds the
    tokens of each row so far, with its prompt; truncated sampling reads them.
    """
    rows = max(1, PART_BYTES // (LOGIT_BYTES * logits.shape[1]))
    parts = []
    for part in (slice(i, i + rows) for i in range(0, len(logits), rows)):
        part_logits = logits[part].float()
        part_logits[:, banned] = -torch.inf
        if context is not None:
            part_logits = _truncate(part_logits, sampling, context[part])
        parts.append(_draw(part_logits, noise[part], sampling))
    chosen, logp = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(logp)


def _draw(logits: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw for one part of the rows, from logits in float32."""
    if sampling.temperature == 0:
        logp = logits.log_softmax(-1)
        chosen = logp.argmax(-1)
    else:
        logp = (logits / sampling.temperature).log_softmax(-1)
        cumulative = logp.double().exp_().cumsum_(-1)
        # scaled by the last sum, which rounding leaves a hair off 1; the first entry above u wins
        target = (noise * cumulative[:, -1])[:, None]
        # NaN logits give an index past the end; the caller sees them by their log-probs
        chosen = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return chosen, logp.gather(1, chosen[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: Sampling, context: Sequence[Sequence[int]]) -> Tensor:
    """Apply penalty and truncation of evaluation to logits [R, V], by transformers' own processors."""
    if sampling.repetition_penalty != 1.0:
        penalty = lp.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        for i, ids in enumerate(context):
            token_ids = torch.tensor([ids], device=logits.device)
            logits[i : i + 1] = penalty(token_ids, logits[i : i + 1])
    if sampling.temperature == 0:
        return logits
    warpers: list[Any] = []
    if sampling.top_k > 0:
        warpers.append(lp.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(lp.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(lp.MinPLogitsWarper(sampling.min_p))
    scaled = logits / sampling.temperature
    for warper in warpers:
        scaled = warper(None, scaled)
    return scaled * sampling.temperature
