"""Credit by sight in an update: which completions are run after masked images, and the advantages that come of it.

A step has one more pass without gradients: the completions with an advantage after their row's masked prompt
(perception.py). Log-probs after the row's own images exist already. If the learner ran the policy at the start of the
step (for later minibatches, and when samples may be stale), its values count; else the engine's, which come from the
same weights (guard `logp_gap`). In conversations of several turns observations stay, with their images, and have no
advantage to be weighed.

Axes: [T], the tokens of a completion; `Item.index` names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from mm_grpo.algorithm.credit import dependency, keep_mass, rule_weights
from mm_grpo.config import AlgorithmConfig, GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.alternate_prompts import require_images
from mm_grpo.learner.features.base import LossFeature
from mm_grpo.learner.features.perception import masked_prompts
from mm_grpo.learner.minibatch import ByCompletion, LogProbs, Minibatch, token_advantages
from mm_grpo.timing import timed
from mm_grpo.types import Group


class Credit(LossFeature):
    """Weights of tokens' advantages by how much each token depends on its image."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Return True if the engine's log-probs may come from another policy."""
        return self.learner.config.rollout.max_staleness > 0

    @classmethod
    def check_rows(cls, config: GRPOConfig, train: Rows, *, several_turns: bool) -> None:
        require_images(train, "credit")

    def begin_step(self, groups: Sequence[Group], minibatches: Sequence[Minibatch]) -> None:
        """Run the completions that have images and an advantage after their row's masked prompt. Collective."""
        learner = self.learner
        self.times = dict[str, float]()
        with timed(self.times, "time/credit"):
            has_advantage = [flag for g in groups for flag in g.has_advantage]
            items = [i for m in minibatches for i in m.live if i.prompt.vision and has_advantage[i.index]]
            masked = masked_prompts(groups, learner)
            with learner.ranks.fail_together("masked images"):
                items = masked.items(items)
            self.control = learner.run(items)[0]
            self.advantages = token_advantages(groups, learner.model.device)

    def weigh(self, minibatches: list[Minibatch], logprobs: LogProbs) -> list[Minibatch]:
        ranks = self.learner.ranks
        with timed(self.times, "time/credit"):
            weighted = [replace(m, advantages=self.advantages) for m in minibatches]
            pairs = [weighed(m, self.control, logprobs, self.algorithm, ranks) for m in weighted]
            self.values = credit_metrics([weights for _, weights in pairs], ranks)
        return [minibatch for minibatch, _ in pairs]

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        del self.control, self.advantages
        return self.values | self.times


def weighed(
    minibatch: Minibatch, control: ByCompletion, logprobs: LogProbs, algorithm: AlgorithmConfig, ranks: Ranks
) -> tuple[Minibatch, Tensor]:
    """Return the minibatch with the advantages of tokens weighed, and the weights of all tokens that have some.

    `control` are log-probs [T] after the masked prompts. Collective.
    """
    assert algorithm.credit is not None and minibatch.advantages is not None
    items = [item for item in minibatch.live if item.index in control]
    engine = {i.index: torch.tensor(logprobs.engine[i.index], dtype=torch.float64) for i in items}
    logps, control_logps, advantages = (
        [values[i.index].cpu() for i in items]
        for values in ({**engine, **logprobs.old}, control, minibatch.advantages)
    )
    dependencies = list(map(dependency, logps, control_logps))
    means = ranks.all_gather([float(s.mean()) for s in dependencies], "dependencies on images")
    weights = rule_weights(dependencies, [m for share in means for m in share], algorithm.credit)
    for _, places in groupby(range(len(items)), key=lambda place: items[place].group):
        group = list(places)
        scaled = keep_mass([weights[k] for k in group], [advantages[k] for k in group])
        weights[group[0] : group[-1] + 1] = scaled
    device = minibatch.inputs.advantages.device
    products = torch.cat([torch.zeros(0), *map(torch.mul, weights, advantages)]).to(device)
    cuts = products.split([len(w) for w in weights])
    changed = {item.index: cut for item, cut in zip(items, cuts, strict=True)}
    return replace(minibatch, advantages=minibatch.advantages | changed), torch.cat(
        [torch.zeros(0), *weights]
    )


def credit_metrics(weights: Sequence[Tensor], ranks: Ranks) -> dict[str, float]:
    """Return, over all processes, the share of tokens with a weight above 1, and the mean weight of the quarter with
    the largest. Collective."""
    gathered = torch.cat(ranks.all_gather(torch.cat([*weights]), "credit"))
    if not len(gathered):
        return {}
    return {
        "credit/above_1": float((gathered > 1 + 1e-6).double().mean()),
        "credit/top_quartile": float(gathered.topk(math.ceil(len(gathered) / 4)).values.mean()),
    }
