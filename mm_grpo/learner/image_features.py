"""Image features of packs: a prompt's images go through the vision tower once for all rows of a pack that hold them.

A frozen tower makes the same features in all passes of a step, so they may be kept. A trained tower runs in each pack,
because the pack's backward goes through it. If a group is spread over packs, its prompt runs apart, with its images
(prompt_states.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mm_grpo.processors.family import Family, VisionFeatures
from mm_grpo.types import Pictured


class ImageFeatures:
    """Image features for packs; with `keep` they are made once, while the caller holds the prompts."""

    def __init__(self, model: Any, family: Family, *, keep: bool = False) -> None:
        self.model, self.family, self.keep = model, family, keep
        self.encoded = 0
        """Images that went through the tower, without blank ones."""
        self._kept: dict[int, VisionFeatures] = {}

    def of(self, prompts: Sequence[Pictured]) -> VisionFeatures:
        """Return the features of all images of a pack's `prompts`, in order; every prompt has images."""
        # by identity: prompts with equal texts may have different images
        features = dict(self._kept)
        new = [p for number, p in {id(p): p for p in prompts}.items() if number not in features]
        if new:
            counts = [self.family.count(p.vision) for p in new]
            vision = {key: tensor.to(self.model.device) for key, tensor in self.family.vision(new).items()}
            new_features = self.family.features(self.model, vision).split(counts)
            features |= dict(zip(map(id, new), new_features, strict=True))
            self.encoded += sum(counts)
        if self.keep:
            self._kept = features
        return VisionFeatures.join([features[id(p)] for p in prompts])


def zero_of_blank(model: Any, family: Family, blank: dict[str, Tensor]) -> Tensor:
    """Return 0 times the features of a blank image, a scalar that gives the whole tower gradients of 0."""
    features = family.features(model, {key: tensor.to(model.device) for key, tensor in blank.items()})
    tensors = [*features.images, *(t for level in features.levels for t in level)]
    return torch.stack([t.sum() for t in tensors]).sum() * 0
