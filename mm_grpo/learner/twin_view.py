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
more than a pack holds; nor, with a warning, rows whose twin cannot be made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import DataError
from mm_grpo.learner.pack import Item
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.rewards.builtins.boxes import Frame
from mm_grpo.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
BOX = "box"
"""Column of the gold box: [x0, y0, x1, y1] in pixels of the first image's file."""


class TwinPrompts:
    """The twin prompts of a run, by group of the step that `begin` was told of; one is made when it is asked for."""

    def __init__(self, processor: Processor, config: GRPOConfig) -> None:
        assert config.algorithm.twin_view is not None
        self.crops = config.algorithm.twin_view.view == "crop"
        self.processor = processor if self.crops else _seeing_more(config)
        self.max_tokens = config.optim.max_tokens_per_pack
        self.begin(())

    def begin(self, groups: Sequence[Group]) -> None:
        """Begin a step with this process's groups; forgets the prompts of the last one."""
        self._groups, self._made = groups, dict[int, Prompt | None]()

    def items(self, items: Iterable[Item]) -> list[Item]:
        """The items after their twin prompts, without those that have none."""
        pairs = ((item, self._of(item.group)) for item in items)
        return [replace(item, prompt=twin) for item, twin in pairs if twin is not None]

    def _of(self, number: int) -> Prompt | None:
        if number not in self._made:
            self._made[number] = self._twin(self._groups[number])
        return self._made[number]

    def _twin(self, group: Group) -> Prompt | None:
        try:
            twin = self.twin(group.prompt)
        except DataError as error:
            log.warning("%s; the row has no term of algorithm.twin_view", error)
            return None
        longest = max(c.run_length for c in group.completions)
        return None if twin is None or len(twin.token_ids) + longest > self.max_tokens else twin

    def twin(self, prompt: Prompt) -> Prompt | None:
        """Make the twin of a prompt; None where it shows no more. DataError, naming the row, where it cannot be."""
        sample, seen = prompt.sample, prompt.engine_prompt.images
        if not seen or (self.crops and sample.columns.get(BOX) is None):
            return None
        if not self.crops:
            twin = self.processor.prompt(sample)
            return None if [i.size for i in twin.engine_prompt.images] == [i.size for i in seen] else twin
        wider = 0
        while True:
            cut = gold_crop(sample, seen[0].width * seen[0].height, wider)
            try:
                return self.processor.prompt(replace(sample, images=(cut, *sample.images[1:])))
            except DataError:
                if wider > max(sample.images[0].size):  # the whole image is refused too
                    raise
                wider += 1 + wider // 4


def gold_crop(sample: Sample, area: int, wider: int = 0) -> Image:
    """The gold box cut out of the first image, in whole pixels, and enlarged to `area` pixels where it has fewer.

    Its shorter side is longer by `wider` pixels at both ends, as far as the image goes. DataError where the box is
    none, or does not lie in the image.
    """
    image = sample.images[0]
    try:
        x0, y0, x1, y1 = Frame(image.size, image.size).gold(sample.columns[BOX], "xyxy", "original")
    except ValueError as error:
        raise DataError(f"{sample.uid}: {error}") from error
    dx, dy = (wider, 0) if x1 - x0 < y1 - y0 else (0, wider)
    left, upper = max(math.floor(x0) - dx, 0), max(math.floor(y0) - dy, 0)
    right, lower = min(math.ceil(x1) + dx, image.width), min(math.ceil(y1) + dy, image.height)
    if left >= right or upper >= lower:
        raise DataError(
            f"{sample.uid}: the gold box {(x0, y0, x1, y1)} lies beside its image of {image.size} pixels"
        )
    cut = image.crop((left, upper, right, lower))
    factor = math.sqrt(area / (cut.width * cut.height))
    # up, for rounding down could make a thin box thinner than the rule allows
    return cut if factor <= 1 else cut.resize((math.ceil(cut.width * factor), math.ceil(cut.height * factor)))


def _seeing_more(config: GRPOConfig) -> Processor:
    """The processor of the run's model with the pixel limit of the twin view."""
    assert config.algorithm.twin_view is not None
    return load_processor(
        config.model.path,
        processor=config.model.processor,
        min_pixels=config.data.min_pixels,
        max_pixels=config.algorithm.twin_view.max_pixels,
        trust_remote_code=config.model.trust_remote_code,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
