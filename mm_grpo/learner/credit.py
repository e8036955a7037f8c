"""Credit by sight in an update: which completions are run after masked images, and the advantages that come of it.

A step has one more pass without gradients: the completions with an advantage after their row's masked prompt
(perception.py), which the G of a group share as they share their own. Log-probs after the row's own images are there
already: those of the policy at the start of the step where the learner has run it, for later minibatches and where
samples may be stale, else the engine's, which are those of the same weights (guard `logp_gap`). In conversations of
several turns observations stay, with their images, and have no advantage to be weighed.

Axes: [T], the tokens of a completion; `Item.index` names it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from mm_grpo.algorithm.credit import RULES, dependency, keep_mass
from mm_grpo.config import AlgorithmConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.minibatch import ByCompletion, LogProbs, Minibatch
from mm_grpo.learner.pack import Item
from mm_grpo.learner.perception import MaskedPrompts
from mm_grpo.types import Group


def acting(groups: Sequence[Group], minibatches: Sequence[Minibatch]) -> list[Item]:
    """The completions that credit is for: their row has images, and they an advantage."""
    acts = [acts for g in groups for acts in g.has_advantage]
    return [i for m in minibatches for i in m.live if i.prompt.vision and acts[i.index]]


def after_masked(items: Sequence[Item], masked: MaskedPrompts, ranks: Ranks) -> list[Item]:
    """The `items` after their row's masked prompt, which has as many tokens. Collective."""
    with ranks.fail_together("masked images"):
        return [replace(item, prompt=masked.of(item.group)) for item in items]


def weighed(
    minibatch: Minibatch, control: ByCompletion, logprobs: LogProbs, algorithm: AlgorithmConfig, ranks: Ranks
) -> tuple[Minibatch, Tensor]:
    """The minibatch with the advantages of tokens weighed, and the weights of all tokens that have some. Collective.

    `control` are log-probs [T] after the masked prompts.
    """
    assert algorithm.credit is not None and minibatch.advantages is not None
    items = [item for item in minibatch.live if item.index in control]
    engine = {i.index: torch.tensor(logprobs.engine[i.index], dtype=torch.float64) for i in items}
    seen, unseen, advantages = (
        [values[i.index].cpu() for i in items]
        for values in ({**engine, **logprobs.old}, control, minibatch.advantages)
    )
    found = list(map(dependency, seen, unseen))
    means = ranks.all_gather([float(s.mean()) for s in found], "dependencies on images")
    weights = RULES[algorithm.credit](found, [m for share in means for m in share], algorithm)
    for _, places in groupby(range(len(items)), key=lambda place: items[place].group):
        own = list(places)
        kept = keep_mass([weights[k] for k in own], [advantages[k] for k in own])
        weights[own[0] : own[-1] + 1] = kept
    device = minibatch.inputs.advantages.device
    products = torch.cat([torch.zeros(0), *map(torch.mul, weights, advantages)]).to(device)
    cuts = products.split([len(w) for w in weights])
    changed = {item.index: cut for item, cut in zip(items, cuts, strict=True)}
    return replace(minibatch, advantages=minibatch.advantages | changed), torch.cat(
        [torch.zeros(0), *weights]
    )


def credit_metrics(weights: Sequence[Tensor], ranks: Ranks) -> dict[str, float]:
    """Of all processes the share of tokens with a weight above 1, and the mean weight of the quarter with the largest.
    Collective."""
    every = torch.cat(ranks.all_gather(torch.cat([*weights]), "credit"))
    if not len(every):
        return {}
    return {
        "credit/above_1": float((every > 1 + 1e-6).double().mean()),
        "credit/top_quartile": float(every.topk(math.ceil(len(every) / 4)).values.mean()),
    }
