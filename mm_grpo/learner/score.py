"""Log-probabilities of given completions under the learner's forward, without an optimizer or a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.forward_pass import ForwardPass
from mm_grpo.learner.minibatch import ByCompletion, split_by_completion
from mm_grpo.learner.pack import Item, Pack, plan
from mm_grpo.learner.step_report import PackStatistics
from mm_grpo.processors.base import Processor
from mm_grpo.types import Prompt


def wrap_model(model: Any, processor: Processor, config: GRPOConfig) -> PackForward:
    """The module that a learner of this config calls."""
    return PackForward(
        model,
        family=processor.family,
        media_token_ids=processor.media_token_ids,
        temperature=config.rollout.temperature,
        attn=config.model.attn,
        shared=processor.layout == "shared_prefix",
    )


def score(
    model: Any,
    processor: Processor,
    config: GRPOConfig,
    prompt: Prompt,
    completions: Sequence[Sequence[int]],
    *,
    as_sampled: bool = False,
) -> list[list[float]]:
    """Log-probabilities [T] of each completion of `prompt`, as the learner computes them.

    Over the whole vocabulary at temperature 1; with `as_sampled`, over the distribution that training samples from
    (media tokens masked, at the training temperature).
    """
    module = wrap_model(model, processor, config)
    if not as_sampled:
        module.media_token_ids, module.temperature = [], 1.0
    items = [Item(i, 0, prompt, tuple(ids)) for i, ids in enumerate(completions)]
    masks, shared = module.masks, processor.layout == "shared_prefix"
    tokens = config.optim.max_tokens_per_pack
    planned = plan(
        items, tokens, masks.multiple, shared=shared, apart=masks.apart
    )  # one group: no row has more
    with ForwardPass(module, planned, processor.media_token_ids, PackStatistics()) as whole:
        found = logprobs_and_entropies(module, whole.packs())[0]
    return [found[i].tolist() for i in range(len(items))]


def logprobs_and_entropies(module: PackForward, packs: Iterable[Pack]) -> tuple[ByCompletion, ByCompletion]:
    """Log-probabilities [T] and entropies [T] of each completion of some packs, without gradients."""
    logps: ByCompletion = {}
    entropies: ByCompletion = {}
    with torch.no_grad():
        for pack in packs:
            order = pack.completion_index.tolist()
            for found, values in zip((logps, entropies), module(pack), strict=True):
                found |= split_by_completion(values, order)
    return logps, entropies
