"""Image features of packs: a prompt's images go through the vision tower once for all rows of a pack that hold them.

A frozen tower makes the same features in all passes of a step, where they may be kept. One that is trained runs in each
pack, whose backward goes through it. Where a group is spread over packs its prompt is run apart, with its images
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
    """Features for the packs of one or more passes; with `keep` for all that ask, while the caller holds the prompts.

    `encoded` counts images that went through the tower, without blank ones.
    """

    def __init__(self, model: Any, family: Family, *, keep: bool = False) -> None:
        self.model, self.family, self.keep = model, family, keep
        self.encoded = 0
        self._kept: dict[int, VisionFeatures] = {}

    def of(self, prompts: Sequence[Pictured]) -> VisionFeatures:
        """The features of all images of a pack's `prompts`, in order; every prompt has images."""
        found = dict(self._kept)
        new = [p for number, p in {id(p): p for p in prompts}.items() if number not in found]
        if new:
            counts = [self.family.count(p.vision) for p in new]
            vision = {key: tensor.to(self.model.device) for key, tensor in self.family.vision(new).items()}
            made = self.family.features(self.model, vision).split(counts)
            found |= dict(zip(map(id, new), made, strict=True))
            self.encoded += sum(counts)
        if self.keep:
            self._kept = found
        return VisionFeatures.join([found[id(p)] for p in prompts])


def zero_of_blank(model: Any, family: Family, blank: dict[str, Tensor]) -> Tensor:
    """0 times the features of a blank image, a scalar: gradients of 0 for all of the tower."""
    features = family.features(model, {key: tensor.to(model.device) for key, tensor in blank.items()})
    return torch.stack([t.sum() for t in features.tensors()]).sum() * 0
