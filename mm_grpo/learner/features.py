"""Image features of a frozen vision tower, kept for the passes of one step.

A step runs the model over its prompts more than once when it has a reference policy, several updates or
several iterations. Where no update can change the tower, its output is the same in all of them, so each
image goes through it once. transformers takes such features in place of pixels (`mm_encoder_outputs`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mm_grpo.types import Prompt


@dataclass(frozen=True)
class ImageFeatures:
    """What a tower makes of images, one entry per image: features [tokens, D], and the same per deepstack level.

    The names are those that transformers' models read.
    """

    pooler_output: tuple[Tensor, ...]
    deepstack_features: tuple[tuple[Tensor, ...], ...] = ()


class KeptFeatures:
    """Encodes the images of a prompt when it first comes by. `encoded` counts images that went through the tower."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.encoded = 0
        self._kept: dict[
            int, tuple[Prompt, ImageFeatures]
        ] = {}  # the prompt too, so that its id stays its own

    def of(self, prompts: Sequence[Prompt]) -> ImageFeatures:
        """The features of all images of `prompts`, in order; every prompt has images."""
        new = {id(p): p for p in prompts if id(p) not in self._kept}
        if new:
            self._encode(list(new.values()))
        found = [self._kept[id(p)][1] for p in prompts]
        levels = zip(*(f.deepstack_features for f in found), strict=True)
        return ImageFeatures(
            tuple(t for f in found for t in f.pooler_output),
            tuple(tuple(t for part in level for t in part) for level in levels),
        )

    def _encode(self, prompts: Sequence[Prompt]) -> None:
        counts = [len(p.vision["image_grid_thw"]) for p in prompts]
        pixels = torch.cat([p.vision["pixel_values"] for p in prompts]).to(self.model.device)
        grids = torch.cat([p.vision["image_grid_thw"] for p in prompts]).to(self.model.device)
        with torch.no_grad():
            made = self.model.model.get_image_features(pixels, grids, return_dict=True)
        levels = getattr(made, "deepstack_features", None) or ()
        start = 0
        for prompt, count in zip(prompts, counts, strict=True):
            own = slice(start, start + count)
            deep = tuple(tuple(level[own]) for level in levels)
            self._kept[id(prompt)] = prompt, ImageFeatures(tuple(made.pooler_output[own]), deep)
            start += count
        self.encoded += start


def can_keep(model: Any) -> bool:
    """Whether features may stand in for pixels: nothing trains the tower, and the model takes them."""
    frozen = not any(p.requires_grad for p in model.model.visual.parameters())
    return frozen and "mm_encoder_outputs" in inspect.signature(model.model.forward).parameters
