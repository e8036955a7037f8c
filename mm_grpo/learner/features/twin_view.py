"""A better view of the image as a teacher: the same weights score the student's own completions after a twin prompt.

    loss = ... + coef * sum over tokens of  w[c] * sum over v of  q(v) (log q(v) - log p(v))

p is the policy after the row's own images, q after its twin, a constant, and v the vocabulary that may be sampled, at
the temperature of training. The twin's images are the file's at up to `twin_view.max_pixels` (`high_resolution`), or
the first image's gold box, enlarged to the area at which the student sees the whole (`crop`); a box that is too thin
for the model's resize rule is widened. Self-distillation from a crop is that of Vision-OPD (arXiv:2605.18740), from
more detail that of VA-OPD (arXiv:2605.21924).

Before an update the twins are run in packs of their own, without gradients: the completions of a group share the twin
prompt, `optim.max_tokens_per_pack` bounds each pack, and the number of backward passes stays. Kept are the states that
predict the tokens, in the host's memory; logits are made from them tile by tile (logprobs.py). No term have rows
without images, without a gold box, whose twin has images of the same size, or whose twin and longest completion are
more than a pack holds; nor, with a warning, rows whose twin cannot be made. Videos stay as the student sees them: rows
hold no larger frames, and boxes are in images. So rows with videos alone have no term.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.errors import DataError
from mm_grpo.learner.alternate_prompts import AlternatePrompts, require_images
from mm_grpo.learner.features.base import FeatureLearner, FeaturePack, LossFeature
from mm_grpo.learner.forward_pass import states_on_host
from mm_grpo.learner.minibatch import ByCompletion, Minibatch
from mm_grpo.learner.step_report import LossStatistics
from mm_grpo.processors.base import Processor, processor_of
from mm_grpo.rewards.builtins.boxes import Frame
from mm_grpo.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
BOX = "box"
"""Column of the gold box: [x0, y0, x1, y1] in pixels of the first image's file."""


class TwinView(LossFeature):
    """KL from the same weights with a better view of the image."""

    def __init__(self, learner: FeatureLearner) -> None:
        super().__init__(learner)
        self.twins = TwinPrompts(learner.processor, learner.config)
        self.teacher: ByCompletion = {}

    @classmethod
    def check_rows(cls, config: GRPOConfig, train: Rows, *, several_turns: bool) -> None:
        twin_view = config.algorithm.twin_view
        column = BOX if twin_view is not None and twin_view.view == "crop" else None
        require_images(train, "twin_view", several_turns=several_turns, videos=False, column=column)

    def has_gradient(self, prompt: Prompt) -> bool:
        return bool(prompt.engine_prompt.images)

    def begin_step(self, groups: Sequence[Group], minibatches: Sequence[Minibatch]) -> None:
        max_tokens = self.learner.config.optim.max_tokens_per_pack
        self.prompts = AlternatePrompts(groups, self.twins.of_group, max_tokens)

    def begin_update(self, minibatch: Minibatch) -> Minibatch:
        """Run the completions after their twin prompts without gradients, for the states of the teacher."""
        with self.learner.ranks.fail_together("twin views"):
            items = self.prompts.items(minibatch.live)
        # the states of the update before are large, and must not stay beside the new ones
        self.teacher = {}
        self.teacher = self.learner.run_pass(items, states_on_host)
        return minibatch.with_kl_states(self.teacher)

    def loss(self, pack: FeaturePack, statistics: LossStatistics) -> Tensor | None:
        assert self.algorithm.twin_view is not None
        weights = pack.weights
        taught = (weights > 0) & pack.mask(lambda item: item.index in self.teacher)
        statistics.add(taught=taught)
        if pack.kl is None:
            return None
        statistics.add(taught, twin_kl=pack.kl)
        return self.algorithm.twin_view.coef * (weights * pack.kl * taught).sum()

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        del self.prompts
        self.teacher = {}
        if "taught" not in sums:
            return {}
        share = {"twin_view/share": sums["taught"] / max(sums["counted"], 1.0)}
        return share | ({"twin_view/kl": sums["twin_kl"] / sums["taught"]} if sums["taught"] else {})


class TwinPrompts:
    """Maker of twin prompts; `processor` makes them."""

    def __init__(self, processor: Processor, config: GRPOConfig) -> None:
        twin_view = config.algorithm.twin_view
        assert twin_view is not None
        self.crops = twin_view.view == "crop"
        self.processor = processor if self.crops else processor_of(config, max_pixels=twin_view.max_pixels)

    def of_group(self, group: Group) -> Prompt | None:
        """Return the twin of a group's prompt; None, with a warning, if it cannot be made."""
        try:
            return self.twin(group.prompt)
        except DataError as error:
            log.warning("%s; the row has no term of algorithm.twin_view", error)
            return None

    def twin(self, prompt: Prompt) -> Prompt | None:
        """Return the twin of a prompt; None if it shows no more. Raise DataError if it cannot be made."""
        sample, images = prompt.sample, prompt.engine_prompt.images
        if not images or (self.crops and sample.columns.get(BOX) is None):
            return None
        if not self.crops:
            twin = self.processor.prompt(sample)
            return None if [i.size for i in twin.engine_prompt.images] == [i.size for i in images] else twin
        wider = 0
        while True:  # until the box is wide enough for the model's resize rule
            crop = gold_crop(sample, images[0].width * images[0].height, wider)
            try:
                return self.processor.prompt(replace(sample, images=(crop, *sample.images[1:])))
            except DataError:
                if wider > max(sample.images[0].size):  # the whole image is refused too
                    raise
                wider += 1 + wider // 4


def gold_crop(sample: Sample, area: int, wider: int = 0) -> Image:
    """Return the gold box cut out of the first image, in whole pixels, enlarged to `area` pixels if it has fewer.

    Its shorter side is longer by `wider` pixels at both ends, as far as the image goes. Raise DataError if the box is
    not valid or lies outside the image.
    """
    image = sample.images[0]
    try:
        x0, y0, x1, y1 = Frame(image.size, image.size).gold(sample.columns[BOX], "xyxy", "original")
    except ValueError as error:
        raise DataError(f"{sample.uid}: {error}") from error
    dx, dy = (wider, 0) if x1 - x0 < y1 - y0 else (0, wider)
    x_min, upper = max(math.floor(x0) - dx, 0), max(math.floor(y0) - dy, 0)
    right, lower = min(math.ceil(x1) + dx, image.width), min(math.ceil(y1) + dy, image.height)
    if x_min >= right or upper >= lower:
        raise DataError(
            f"{sample.uid}: the gold box {(x0, y0, x1, y1)} lies beside its image of {image.size} pixels"
        )
    cut = image.crop((x_min, upper, right, lower))
    factor = math.sqrt(area / (cut.width * cut.height))
    # up, for rounding down could make a thin box thinner than the rule allows
    return cut if factor <= 1 else cut.resize((math.ceil(cut.width * factor), math.ceil(cut.height * factor)))
