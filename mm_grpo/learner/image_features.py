"""Image features that several passes or packs share, so that no image goes through the vision tower for each row.

A frozen tower makes the same features in all passes of a step. One that is trained makes the same ones in all packs of
a pass, for no update comes between them; its gradients are those of every pack at once, in one backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mm_grpo.learner.prompt_states import summed_leaf
from mm_grpo.processors.family import Family, VisionFeatures
from mm_grpo.types import Pictured


class SharedFeatures:
    """Image features for the packs of one pass, whose prompts are `packs`, each pack asking once and in any order.

    A prompt's images are encoded once for all rows of a pack. One whose group is spread over several packs is encoded
    without gradients in the first of them, and the others take these features. Where the tower is trained, the packs
    before the last leave the gradients of its features here, and the last encodes it again, with gradients, to which
    it adds those. So each pack's backward goes through the tower once, at the same point of it: through images that
    are complete, or through a blank one times 0. ZeRO-2 needs that (see forward.py); without `blanks` none is run.
    Without `packs` a frozen tower's features are kept for all that ask, while the caller holds the prompts. `encoded`
    counts images that went through the tower, without blank ones.
    """

    def __init__(
        self, model: Any, family: Family, packs: Iterable[Sequence[Pictured]] = (), *, blanks: bool = True
    ) -> None:
        self.model, self.family = model, family
        self.trained = not family.tower_is_frozen(model)
        self.blank = family.blank(model) if self.trained and blanks else {}
        self.encoded = 0
        self._left = Counter(number for prompts in packs for number in {id(p) for p in prompts})
        self._kept: dict[int, VisionFeatures] = {}
        self._sums: dict[int, list[Tensor | None]] = {}
        """By prompt: fp32 sums of the gradients of its features, in the order of `VisionFeatures.tensors`."""

    def of(self, prompts: Sequence[Pictured]) -> VisionFeatures:
        """The features of all images of a pack's `prompts`, in order; every prompt has images."""
        each = {id(p): p for p in prompts}
        self._left.subtract(each.keys())
        if self.trained and torch.is_grad_enabled():
            complete = [p for number, p in each.items() if self._left[number] == 0]
            found = dict(zip(map(id, complete), self._with_gradients(complete), strict=True))
            waiting = [p for p in each.values() if id(p) not in found]
            self._keep(waiting)
            found |= {id(p): self._leaves(id(p)) for p in waiting}
            if not complete and self.blank:
                found[id(waiting[0])] = self._touched_by_blank(found[id(waiting[0])])
        else:
            self._keep(list(each.values()))
            found = {number: self._kept[number] for number in each}
        for number in each:
            if self._left[number] == 0:
                self._kept.pop(number, None)
        return VisionFeatures.join([found[id(p)] for p in prompts])

    def _keep(self, prompts: Sequence[Pictured]) -> None:
        new = [p for p in prompts if id(p) not in self._kept]
        with torch.no_grad():
            self._kept |= dict(zip(map(id, new), self._encode(new), strict=True))

    def _encode(self, prompts: Sequence[Pictured]) -> list[VisionFeatures]:
        self.encoded += sum(self.family.count(p.vision) for p in prompts)
        return encode(self.model, self.family, prompts) if prompts else []

    def _with_gradients(self, prompts: Sequence[Pictured]) -> list[VisionFeatures]:
        made = self._encode(prompts)
        for place, prompt in enumerate(prompts):
            sums = self._sums.pop(id(prompt), None)
            if sums is not None:
                made[place] = _rebuilt(made[place], map(_with_gradient, made[place].tensors(), sums))
        return made

    def _leaves(self, number: int) -> VisionFeatures:
        """The kept features of a prompt as leaves, whose gradients are added to the prompt's sums."""
        tensors = self._kept[number].tensors()
        sums = self._sums.setdefault(number, [None] * len(tensors))
        leaves = (summed_leaf(tensor, sums, place) for place, tensor in enumerate(tensors))
        return _rebuilt(self._kept[number], leaves)

    def _touched_by_blank(self, features: VisionFeatures) -> VisionFeatures:
        zero = zero_of_blank(self.model, self.family, self.blank)
        first, *others = features.tensors()
        return _rebuilt(features, [first + zero.to(first.dtype), *others])


def encode(model: Any, family: Family, prompts: Sequence[Pictured]) -> list[VisionFeatures]:
    """The features of the images of each of `prompts`, from one run of the tower."""
    vision = {key: tensor.to(model.device) for key, tensor in family.vision(prompts).items()}
    return list(family.features(model, vision).split([family.count(p.vision) for p in prompts]))


def zero_of_blank(model: Any, family: Family, blank: dict[str, Tensor]) -> Tensor:
    """0 times the features of a blank image, a scalar: gradients of 0 for all of the tower."""
    features = family.features(model, {key: tensor.to(model.device) for key, tensor in blank.items()})
    return torch.stack([t.sum() for t in features.tensors()]).sum() * 0


def _rebuilt(features: VisionFeatures, tensors: Iterable[Tensor]) -> VisionFeatures:
    """`features` with other tensors, in the order of `VisionFeatures.tensors`."""
    given = iter(tensors)
    images = tuple(next(given) for _ in features.images)
    levels = tuple(tuple(next(given) for _ in level) for level in features.levels)
    return replace(features, images=images, levels=levels)


def _with_gradient(features: Tensor, more: Tensor | None) -> Tensor:
    """`features`, whose gradient will be what comes plus `more`."""
    if more is not None:
        features.register_hook(lambda grad: (grad.float() + more).to(grad.dtype))
    return features
