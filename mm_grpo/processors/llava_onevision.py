"""LLaVA-OneVision (`llava_onevision`): a picture of the whole, and tiles of the image at one of a list of resolutions.

The image is fitted into the one of `image_grid_pinpoints` that wastes least (`select_best_resolution` in transformers),
keeping its aspect ratio; that canvas is cut into tiles, and features of its empty borders are left out again. The
number of tokens is the number of features that are left, so it depends on the image and not on the canvas.

A picture at the model's size touches two borders of its canvas: nothing is resized but the small picture of the whole,
which is made from it. Every image of a prompt is tiled, as vLLM does it. (Transformers' own processor shows several
images as one small picture each, if it gets them as one nested list.)

A frame of a video is one tile, whose features are pooled to a quarter; one newline ends the video. Vision tensors have
the frames of a video in the place of tiles, and `frames`, their number: 0 for an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import register
from mm_grpo.processors.family import Family, VisionFeatures
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.processors.image_size import NoFixedPoint, Size, settle


class LlavaOnevisionFamily(Family):
    """`image_newline`, a parameter of the model itself, is written between rows of features: a part of the tower."""

    def tower(self, model: Any) -> nn.Module:
        backbone = model.model
        newline = nn.ParameterList([backbone.image_newline])
        return nn.ModuleList([backbone.vision_tower, backbone.multi_modal_projector, newline])

    def blank(self, model: Any) -> dict[str, Tensor]:
        """A picture at the smallest resolution: with the picture of the whole, two tiles or more."""
        side = model.config.vision_config.image_size
        height, width = min(model.config.image_grid_pinpoints, key=math.prod)
        tiles = 1 + (height // side) * (width // side)
        return {
            "pixel_values": torch.zeros(tiles, model.config.vision_config.num_channels, side, side),
            "image_sizes": torch.tensor([[height, width]]),
            "frames": torch.zeros(1, dtype=torch.long),
        }

    def count(self, vision: Mapping[str, Tensor]) -> int:
        return len(vision["image_sizes"]) if vision else 0

    def hidden_states(self, model: Any, *, frames: Tensor | None = None, **inputs: Any) -> Tensor:
        if frames is not None:
            # the model's forward takes the images of all rows before the videos, and videos of one length alone
            vision = {
                "frames": frames,
                **{name: inputs.pop(name) for name in ("pixel_values", "image_sizes")},
            }
            ids = inputs.pop("input_ids")
            embeds = model.get_input_embeddings()(ids)
            features = torch.cat(self.features(model, vision).images).to(embeds)
            is_medium = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
            inputs["inputs_embeds"] = embeds.masked_scatter(is_medium[..., None], features)
        return super().hidden_states(model, **inputs)

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> VisionFeatures:
        """Run the tower over all images together, and over each video."""
        backbone, sizes, config = model.model, vision["image_sizes"], model.config
        frames = dict(enumerate(vision["frames"].tolist()))
        resolutions, side = config.image_grid_pinpoints, config.vision_config.image_size
        counts = [frames[i] or image_size_to_num_patches(sizes[i], resolutions, side) for i in frames]
        pixels = vision["pixel_values"].split(counts)
        features: dict[int, Tensor] = {}
        if images := [i for i in frames if not frames[i]]:
            tiles = torch.cat([pixels[i] for i in images])
            output = backbone.get_image_features(tiles, sizes[images], return_dict=True)
            features = dict(zip(images, output.pooler_output, strict=True))
        pooled = math.ceil(side // config.vision_config.patch_size / 2) ** 2
        for i in frames.keys() - features.keys():
            video = backbone.get_video_features(pixels[i][None], return_dict=True).pooler_output[0]
            # transformers 5.10 leaves the newline to its forward
            features[i] = torch.cat([video, backbone.image_newline[None]])[: frames[i] * pooled + 1]
        return VisionFeatures(tuple(features[i] for i in frames))


@register("llava_onevision")
class LlavaOnevisionProcessor(HFProcessor):
    """The processor of one LLaVA-OneVision model, read from its folder.

    `min_pixels` and `max_pixels` bound the area of the canvas, one of the model's resolutions.
    """

    family = LlavaOnevisionFamily()
    stable = "images that fit one of the model's resolutions between data.min_pixels and data.max_pixels"

    def media_tokens(self) -> Iterator[str]:
        return iter((self.hf.image_token, self.hf.video_token))

    def limits(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        resolutions: list[list[int]] = self.hf.image_processor.image_grid_pinpoints
        low, high = min_pixels or 0, max_pixels or max(map(math.prod, resolutions))
        self.frame = (self.config.vision_config.image_size,) * 2
        self.resolutions = [sides for sides in resolutions if low <= math.prod(sides) <= high]
        if not self.resolutions:
            areas = sorted(set(map(math.prod, resolutions)))
            raise ConfigError(
                f"data.max_pixels = {max_pixels} and data.min_pixels = {min_pixels}: none of the model's resolutions "
                f"has an area between them; they have from {areas[0]} to {areas[-1]} pixels"
            )
        return min(map(math.prod, self.resolutions)), max(map(math.prod, self.resolutions))

    def fixed_size(self, size: Size) -> Size:
        resolutions = self.hf.image_processor.image_grid_pinpoints
        # the model's rule picks from all its resolutions, not ours alone: check that a fitted image stays in ours
        settled = settle(_fit(size, self.resolutions), lambda size: _fit(size, resolutions))
        if list(select_best_resolution(settled, resolutions)) not in self.resolutions:
            raise NoFixedPoint(
                f"{size[1]}x{size[0]} pixels: it fits none of {len(self.resolutions)} of the model's "
                f"{len(resolutions)} resolutions"
            )
        return settled

    def limited_size(self, size: Size, min_pixels: int, max_pixels: int) -> Size:
        resolutions = [sides for sides in self.resolutions if min_pixels <= math.prod(sides) <= max_pixels]
        if not resolutions:
            raise NoFixedPoint(f"no resolution of the model has an area from {min_pixels} to {max_pixels}")
        return _fit(size, resolutions)

    def video_placeholder(self) -> str:
        return str(self.hf.video_token)

    @property
    def mm_processor_kwargs(self) -> Mapping[str, Any]:
        # frames have the size that vLLM resizes to; those of its own trial at the start have another
        return {"videos_kwargs": {"do_sample_frames": False}}

    def max_image_tokens(self) -> int:
        """Return the tokens of the small picture, of at most 1.1 ** 2 times `anyres_max_N` tiles, and of newlines."""
        picture_tokens = int(self.hf.num_image_tokens)
        side = math.isqrt(picture_tokens)
        tile = self.hf.image_processor.size
        height, width = (int(tile.get(edge) or tile["shortest_edge"]) for edge in ("height", "width"))
        max_tiles = 1.21 * int(self.hf.vision_aspect_ratio.removeprefix("anyres_max_"))
        tiles = ((h // height, w // width) for h, w in self.resolutions)
        return max(
            picture_tokens + math.floor(min(rows * columns, max_tiles) * picture_tokens) + rows * side
            for rows, columns in tiles
        )

    def max_video_tokens(self, frames: int) -> int:
        return frames * math.ceil(math.isqrt(int(self.hf.num_image_tokens)) / 2) ** 2 + 1

    def vision(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        videos = [output.get("pixel_values_videos", [()])[0] for output in outputs]
        pixels = [v if len(v) else o["pixel_values"][0] for v, o in zip(videos, outputs, strict=True)]
        sizes = [output.get("image_sizes", torch.tensor([self.frame])) for output in outputs]
        return {
            "pixel_values": torch.cat(pixels),
            "image_sizes": torch.cat(sizes),
            "frames": torch.tensor([len(video) for video in videos]),
        }


def _fit(size: Size, resolutions: list[list[int]]) -> Size:
    """Scale `size` into the best of the resolutions, keeping its aspect ratio: one side is the resolution's."""
    (height, width), (max_height, max_width) = size, select_best_resolution(size, resolutions)
    by_height, by_width = max_height / height, max_width / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), max_height), max_width
    return max_height, min(math.ceil(width * by_height), max_width)
