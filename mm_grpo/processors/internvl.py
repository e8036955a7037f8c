"""InternVL3 and InternVL3.5 in transformers' form (`internvl`, the models whose names end in -HF): tiles of 448 pixels.

An image is cut into the grid of at most `max_patches` square tiles with the nearest aspect ratio; a grid of more than
one tile also gets a small picture of the whole. Each tile becomes 256 tokens. The grid is picked by transformers' image
processor (`get_optimal_tiled_canvas` in image_processing_got_ocr2), which vLLM calls too.

A picture at the model's size is exactly such a grid: the tiles are cut out of it, not resized again. The small picture
of the whole is made from it too, and so has been resized twice. With `max_patches` above 15 the rule does not settle at
once for some grids: it takes 4 x 4 for a picture that is 3 x 3, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import register
from mm_grpo.processors.family import TiledFamily
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.processors.image_size import NoFixedPoint, Size
from mm_grpo.processors.video_input import FRAMES_UNCHANGED
from mm_grpo.types import Medium, Video


class InternVLFamily(TiledFamily):
    def tile(self, model: Any) -> tuple[int, int, int]:
        vision = model.config.vision_config
        return vision.num_channels, *vision.image_size


@register("internvl")
class InternVLProcessor(HFProcessor):
    """The processor of one InternVL model, read from its folder.

    `min_pixels` and `max_pixels` bound the area of the grid of tiles: they set `min_patches` and `max_patches`.
    """

    family = InternVLFamily()
    stable = "images whose grid of tiles fits data.min_pixels and data.max_pixels"

    def media_tokens(self) -> Iterator[str]:
        hf = self.hf
        return iter((hf.image_token, hf.video_token, hf.start_image_token, hf.end_image_token))

    def limits(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        images = self.hf.image_processor
        self.tile: Size = (int(images.size["height"]), int(images.size["width"]))
        self.frame = self.tile
        self.family = InternVLFamily()
        self.family.video_token_id = self.video_token_id  # the config has none
        area = self.tile[0] * self.tile[1]
        if min_pixels is not None:
            images.min_patches = math.ceil(min_pixels / area)
        if max_pixels is not None:
            images.max_patches = max_pixels // area
        if not 1 <= images.min_patches <= images.max_patches:
            raise ConfigError(
                f"data.max_pixels = {max_pixels} and data.min_pixels = {min_pixels} allow {images.min_patches} to "
                f"{images.max_patches} tiles of {self.tile[1]}x{self.tile[0]} pixels, of which an image is made; an "
                f"image needs one at least: max_pixels >= {area}, and >= min_pixels"
            )
        return images.min_patches * area, images.max_patches * area

    @property
    def mm_processor_kwargs(self) -> Mapping[str, Any]:
        images = self.hf.image_processor
        limits = {"min_patches": images.min_patches, "max_patches": images.max_patches}
        return {**limits, "videos_kwargs": FRAMES_UNCHANGED}

    def limited_size(self, size: Size, min_pixels: int, max_pixels: int) -> Size:
        area = math.prod(self.tile)
        least, most = math.ceil(min_pixels / area), max_pixels // area
        if least > most:
            raise NoFixedPoint(
                f"no grid of tiles of {area} pixels has an area from {min_pixels} to {max_pixels}"
            )
        columns, rows = get_optimal_tiled_canvas(size, self.tile, least, most)
        return rows * self.tile[0], columns * self.tile[1]

    def max_video_tokens(self, frames: int) -> int:
        text = self.tokenizer(f"Frame{frames}: \n", add_special_tokens=False)["input_ids"]
        return int(frames * (len(text) + 2 + self.hf.image_seq_length))

    def video_placeholder(self) -> str:
        return str(self.hf.video_token)

    def output_of(self, medium: Medium) -> Any:
        output = super().output_of(medium)
        if isinstance(medium, Video):  # in transformers its tokens are an image's, in vLLM a video's
            ids = output["input_ids"]
            ids[ids == self.image_token_id] = self.video_token_id
        return output

    def max_image_tokens(self) -> int:
        tiles = self.hf.image_processor.max_patches
        return int(self.hf.image_seq_length * (tiles + 1 if tiles > 1 else 1)) + 2

    def vision(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        pixels = [output["pixel_values"] for output in outputs]
        return {"pixel_values": torch.cat(pixels), "tiles": torch.tensor([len(tiles) for tiles in pixels])}
