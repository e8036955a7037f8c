"""Gemma 3 (`gemma3`): one square picture for each image, whose tokens see each other, and sliding windows.

An image is stretched to the one size of the model's tower, 896 x 896 pixels, and becomes 256 tokens between
`<start_of_image>` and `<end_of_image>`, with an empty line before and behind. A picture at the model's size is such a
square; pan-and-scan, which cuts wide images, has nothing to cut in it.

Attention. In layers of full attention the tokens of an image also see later tokens of the image. In layers of
sliding windows nothing sees farther back than `sliding_window` tokens. A pack holds both: positions of a completion
follow its prompt's, so that distances are as in one row of prompt + completion.

Ids. The empty lines run together with line breaks of the text around them, so the text is tokenised again with images
written out, as transformers' processor does it; vLLM has rules of its own for that, up to four line breaks in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import register
from mm_grpo.processors.family import Family, VisionFeatures
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.processors.image_size import Size
from mm_grpo.types import Picture, Prompt, Sample


class Gemma3Family(Family):
    layer_types = frozenset({"full_attention", "sliding_attention"})
    looks_ahead = True

    def blank(self, model: Any) -> dict[str, Tensor]:
        vision = model.config.vision_config
        return {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}

    def hidden_states(self, model: Any, **inputs: Any) -> Tensor:
        """As `Family.hidden_states`; tell the model which tokens are an image's, unless the masks already say it."""
        ids = inputs.get("input_ids")
        if ids is not None and ids.shape[1] > 1 and not isinstance(inputs.get("attention_mask"), dict):
            inputs["token_type_ids"] = (ids == model.config.image_token_id).long()
        return super().hidden_states(model, **inputs)

    def image_blocks(self, model: Any, input_ids: Tensor) -> Tensor:
        image = input_ids == model.config.image_token_id
        starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
        numbers: Tensor = (starts.cumsum(1) - 1).masked_fill(~image, -1)
        return numbers

    def output(self, features: VisionFeatures) -> Any:
        return SimpleNamespace(pooler_output=torch.stack(features.images))


@register("gemma3")
class Gemma3Processor(HFProcessor):
    """The processor of one Gemma 3 model, read from its folder. Every image is of one size."""

    family = Gemma3Family()

    def media_tokens(self) -> Iterator[str]:
        tokenizer = self.hf.tokenizer
        return iter((tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token))

    def placeholder(self) -> str:
        return str(self.hf.boi_token)

    def limits(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        size = self.hf.image_processor.size
        self.size: Size = (int(size["height"]), int(size["width"]))
        area = self.size[0] * self.size[1]
        if not (min_pixels or area) <= area <= (max_pixels or area):
            raise ConfigError(
                f"data.min_pixels = {min_pixels} and data.max_pixels = {max_pixels}: every image of this model is "
                f"brought to {self.size[1]}x{self.size[0]} = {area} pixels; remove the limit"
            )
        return area, area

    def fixed_size(self, size: Size) -> Size:
        return self.size

    def max_image_tokens(self) -> int:
        return int(self.hf.image_seq_length) + 4

    def expand(self, sample: Sample, collapsed: Sequence[int], images: Sequence[Sequence[int]]) -> list[int]:
        return self.ids(sample, lambda text: text.replace(self.hf.boi_token, self.hf.full_image_sequence))

    def extended(self, prompt: Prompt, token_ids: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
        extended = super().extended(prompt, token_ids, pictures)
        if not pictures:  # sampled tokens must stay as they are
            return extended
        # empty lines around a picture run together with line breaks of the text, as in a prompt
        ids = [*prompt.token_ids, *self._join_breaks(extended.token_ids[len(prompt.token_ids) :])]
        positions = self.positions(ids, extended.vision, extended.engine_prompt.media)
        return replace(extended, token_ids=tuple(ids), position_ids=positions)

    def _join_breaks(self, token_ids: Sequence[int]) -> list[int]:
        """Tokenise each run of line breaks again, as one text."""
        texts = {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in set(token_ids)}
        breaks = {token: str(text) for token, text in texts.items() if text and not text.strip("\n")}
        joined: list[int] = []
        for is_break, run in groupby(token_ids, key=breaks.__contains__):
            if is_break:
                text = "".join(breaks[token] for token in run)
                joined += self.tokenizer(text, add_special_tokens=False)["input_ids"]
            else:
                joined += run
        return joined

    def vision(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {"pixel_values": torch.cat([output["pixel_values"] for output in outputs])}
