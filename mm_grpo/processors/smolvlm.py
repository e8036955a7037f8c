"""SmolVLM and SmolVLM2 (`smolvlm`) and Idefics3 (`idefics3`): rows of square tiles, and the whole picture last.

Every image is resized to a longest edge of `size.longest_edge` pixels, then stretched: both sides are whole tiles
of `max_image_size.longest_edge`. The tiles come row by row, then a small picture of the whole; an image of one tile is
that small picture alone. Each tile is written as `<fake_token_around_image>`, its place (`<row_1_col_2>` or
`<global-img>`) and `image_seq_len` image tokens.

A picture at the model's size has both sides in whole tiles and the longest edge as its longer side: the tiles are cut
out of it, not resized again. The small picture of the whole is made from it too, and so has been resized twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.smolvlm import processing_smolvlm

from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import register
from mm_grpo.processors.family import TiledFamily
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.processors.image_size import Size, settle

PLACE = re.compile(r"<row_\d+_col_\d+>")
"""Tokens for the place of a tile in the picture."""


class SmolVLMFamily(TiledFamily):
    def tower(self, model: Any) -> nn.Module:
        return nn.ModuleList([model.model.vision_model, model.model.connector])

    def tile(self, model: Any) -> tuple[int, int, int]:
        vision = model.config.vision_config
        return vision.num_channels, vision.image_size, vision.image_size

    def language_model(self, model: Any) -> nn.Module:
        layers: nn.Module = model.model.text_model
        return layers

    def pixels(self, pixel_values: Tensor) -> Tensor:
        """Return tiles as of one row: the model takes tiles of several rows, padded with zeros to one number."""
        if pixel_values.ndim != 4:  # the model does not look at pixels when it gets features
            return pixel_values
        # the model drops a tile of zeros as padding, and a blank picture may be one: its first number becomes 1e-6
        empty = ~pixel_values.flatten(1).any(1)
        first = torch.zeros_like(pixel_values)
        first[:, 0, 0, 0] = empty * 1e-6
        return (pixel_values + first)[None]


@register("smolvlm", "idefics3")
class SmolVLMProcessor(HFProcessor):
    """The processor of one SmolVLM model, read from its folder.

    `max_pixels` bounds the square of the longest edge, in whole tiles. Smaller images are enlarged to that edge: the
    least area is one row of tiles.
    """

    family = SmolVLMFamily()
    stable = "images that a grid of whole tiles under data.max_pixels can show"

    def media_tokens(self) -> Iterator[str]:
        hf = self.hf
        yield from (hf.image_token, str(hf.fake_image_token))
        yield from (getattr(hf, "global_image_token", None) or hf.global_image_tag, "<video>")
        yield from (token for token in hf.tokenizer.get_vocab() if PLACE.fullmatch(token))

    def limits(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        images = self.hf.image_processor
        if not images.do_image_splitting:
            raise ConfigError(
                "model.path: preprocessor_config.json has do_image_splitting = false, which resizes every image twice; "
                "set it to true, and data.max_pixels to the area of one tile for one tile an image"
            )
        self.tile = int(images.max_image_size["longest_edge"])
        longest = int(images.size["longest_edge"])
        if max_pixels is not None:
            longest = math.isqrt(max_pixels) // self.tile * self.tile
            images.size = {"longest_edge": longest}
        row_area = self.tile * longest
        if not longest or (min_pixels or 0) > row_area:
            raise ConfigError(
                f"data.max_pixels = {max_pixels} and data.min_pixels = {min_pixels}: images are grids of tiles of "
                f"{self.tile}x{self.tile} pixels, with the longest edge that max_pixels allows; max_pixels must be at "
                f"least {self.tile**2}, and min_pixels at most one row of tiles, {row_area or self.tile**2}"
            )
        return row_area, max(longest, self.tile) ** 2

    @property
    def mm_processor_kwargs(self) -> Mapping[str, Any]:
        return {"size": {"longest_edge": self.hf.image_processor.size["longest_edge"]}}

    def fixed_size(self, size: Size) -> Size:
        longest, tile = int(self.hf.image_processor.size["longest_edge"]), self.tile

        def rule(size: Size) -> Size:
            height, width = _to_longest(size, longest)
            aspect = width / height
            if width >= height:
                width = math.ceil(width / tile) * tile
                return math.ceil(int(width / aspect) / tile) * tile, width
            height = math.ceil(height / tile) * tile
            return height, math.ceil(int(height * aspect) / tile) * tile

        return settle(size, rule)

    def max_image_tokens(self) -> int:
        side = math.ceil(int(self.hf.image_processor.size["longest_edge"]) / self.tile)
        tiles = side * side + 1 if side > 1 else 1
        return tiles * (int(self.hf.image_seq_len) + 2) + 1 + side * 2

    def vision(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        pixels = [output["pixel_values"][0] for output in outputs]
        return {"pixel_values": torch.cat(pixels), "tiles": torch.tensor([len(tiles) for tiles in pixels])}

    def _load(self, path: str) -> Any:
        allow_without_num2words()
        return super()._load(path)


def _to_longest(size: Size, longest: int) -> Size:
    """Apply the first half of the rule: `longest` pixels on the longer side, an even number on the other."""
    height, width = size
    if width >= height:
        shorter = int(longest / (width / height))
        return max(shorter + shorter % 2, 1), longest
    shorter = int(longest * (width / height))
    return longest, max(shorter + shorter % 2, 1)


def allow_without_num2words() -> None:
    """Make SmolVLM's processor loadable without num2words, which it needs for videos alone; in vLLM too."""
    # needless when transformers imports num2words only for videos
    module: Any = processing_smolvlm
    if module.num2words is None:
        module.num2words = _refuse_videos


def _refuse_videos(number: int) -> str:
    raise ConfigError("num2words is not installed, which SmolVLM's processor needs for videos")
