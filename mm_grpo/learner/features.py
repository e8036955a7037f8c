"""Image features of a frozen vision tower, kept for the passes of one step.

A step runs the model over its prompts more than once when it has a reference policy, several updates or
several iterations. Where no update can change the tower, its output is the same in all of them, so each
image goes through it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mm_grpo.types import Prompt


@dataclass(frozen=True)
class ImageFeatures:
    """What a tower makes of images, one entry per image: features [tokens, D], and the same per deepstack level.

    The names are those that transformers' models read. Before 5.19 they read a level as one tensor, of all images.
    """

    pooler_output: tuple[Tensor, ...]
    deepstack_features: tuple[tuple[Tensor, ...] | Tensor, ...] = ()


class KeptFeatures:
    """Encodes the images of a prompt when it first comes by. `encoded` counts images that went through the tower."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.encoded = 0
        # By a prompt's id: the prompt too, so that its id stays its own; its images' features, then each level's.
        self._kept: dict[int, tuple[Prompt, list[tuple[Tensor, ...]]]] = {}
        self._whole_levels = False

    def of(self, prompts: Sequence[Prompt]) -> ImageFeatures:
        """The features of all images of `prompts`, in order; every prompt has images."""
        new = {id(p): p for p in prompts if id(p) not in self._kept}
        if new:
            self._encode(list(new.values()))
        found = [self._kept[id(p)][1] for p in prompts]
        features, *levels = (tuple(t for part in parts for t in part) for parts in zip(*found, strict=True))
        return ImageFeatures(features, tuple(torch.cat(x) if self._whole_levels else x for x in levels))

    @contextmanager
    def given_to(self, model: Any, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Within it `model`, or a reference with the same tower, takes these for whatever pixels it is given.

        transformers has an argument for this since 5.19; the method that its models ask in their forward pass is
        there in versions before.
        """
        features = self.of(prompts)
        model.model.get_image_features = lambda *pixels, **options: features  # hides the method of the class
        try:
            yield
        finally:
            del model.model.get_image_features

    def _encode(self, prompts: Sequence[Prompt]) -> None:
        counts = [len(p.vision["image_grid_thw"]) for p in prompts]
        pixels = torch.cat([p.vision["pixel_values"] for p in prompts]).to(self.model.device)
        grids = torch.cat([p.vision["image_grid_thw"] for p in prompts]).to(self.model.device)
        with torch.no_grad():
            made = self.model.model.get_image_features(pixels, grids, return_dict=True)
        levels = getattr(made, "deepstack_features", None) or ()
        self._whole_levels = any(isinstance(level, Tensor) for level in levels)
        lengths = [len(t) for t in made.pooler_output]
        levels = [level.split(lengths) if self._whole_levels else level for level in levels]
        start = 0
        for prompt, count in zip(prompts, counts, strict=True):
            own = slice(start, start + count)
            self._kept[id(prompt)] = prompt, [tuple(x[own]) for x in (made.pooler_output, *levels)]
            start += count
        self.encoded += start


def tower_is_frozen(model: Any) -> bool:
    """Whether nothing trains the vision tower: an image's features are then the same in all passes of a step."""
    return not any(p.requires_grad for p in model.model.visual.parameters())
