"""Only the tokens of the highest entropy enter the loss (`algorithm.top_entropy_quantile`, algorithm/masks.py)."""

from __future__ import annotations

from dataclasses import replace

import torch

from mm_grpo.algorithm.masks import top_entropy_mask
from mm_grpo.learner.features.base import LossFeature
from mm_grpo.learner.minibatch import Minibatch


class TopEntropy(LossFeature):
    """Mask of the tokens of each update. It takes a pass of its own, because the quantile is over the whole update."""

    extra_passes = 1

    def begin_update(self, minibatch: Minibatch) -> Minibatch:
        """Return the minibatch with a mask of the tokens with weight whose entropy is in the quantile. Collective."""
        learner, inputs = self.learner, minibatch.inputs
        weights = inputs.weights.tolist()
        items = [item for item in minibatch.items if weights[item.index] > 0]
        entropies = learner.run(items)[1]
        # one tensor also on a process without items, because every process takes part in the gathering
        local = torch.cat([*entropies.values(), torch.zeros(0, device=learner.model.device)]).cpu()
        shares = learner.ranks.all_gather(local, "entropies")
        gathered = torch.cat(shares)
        mask = top_entropy_mask(gathered, self.algorithm.top_entropy_quantile)
        local_mask = mask.split([len(share) for share in shares])[learner.ranks.rank].to(learner.model.device)
        masks = local_mask.float().split([len(values) for values in entropies.values()])
        inputs = replace(inputs, tokens=int(mask.sum()))
        return replace(minibatch, inputs=inputs, token_mask=dict(zip(entropies, masks, strict=True)))
