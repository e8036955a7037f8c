"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images, videos and chat messages to prompts, and how models are built.

They share a prompt format (`<|vision_start|><|image_pad|>...<|vision_end|>`), a resize rule and M-RoPE positions. Patch
size and position rule differ; they are read from the model's own config and image processor.

The resize. Both sides of an image are rounded to a multiple of `factor`, and the area is kept between two limits
(`smart_resize` in transformers' image_processing_qwen2_vl, which vLLM calls too). Applied to its own result the rule
can change the size again, if the area is near the limits. Engines cannot be asked not to resize, so an image is resized
once, to a size that the rule maps to itself, and refused if there is none. The frames of a video are resized like
images; engines can be told not to resize those.

A video is patches of two frames each. Its tensors join those of images, in the order of the prompt's media: the tower
treats an image as a video of two equal frames. In Qwen2-VL and Qwen2.5-VL a video is one run of tokens, and time is in
the positions; in Qwen3-VL and Qwen3.5 it is a run of tokens for each pair of frames, behind its time in text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.video_utils import VideoMetadata

from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import register
from mm_grpo.processors.family import Family
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.processors.image_size import NoFixedPoint, Size, settle
from mm_grpo.processors.video_input import FRAMES_UNCHANGED, frames_array, video_metadata
from mm_grpo.types import Medium, Video

IMAGE_TOKENS = 1280
"""Most tokens of an image if `data.max_pixels` is not set, as Qwen's model cards advise. The models' own limit is
16,384, and a 12-megapixel photo has some 15,000."""
FRAME_TOKENS = 256
"""Most tokens of two frames of a video if `data.video_max_pixels` is not set."""

LATEST = 99_999
"""Seconds that no time of a frame has more digits than."""


class QwenVLFamily(Family):
    """`model.model.visual` makes features, its merger included; positions are M-RoPE.

    In Qwen3.5 most text layers are of linear attention. Qwen3-VL and Qwen3.5 have mixtures of experts.
    """

    position_axes = (3,)
    layer_types = frozenset({"full_attention", "linear_attention"})

    def tower(self, model: Any) -> nn.Module:
        tower: nn.Module = model.model.visual
        return tower

    def blank(self, model: Any) -> dict[str, Tensor]:
        """Return one merged patch of zeros: the smallest input that the vision tower accepts."""
        vision = model.config.vision_config
        merge, width = vision.spatial_merge_size, vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(merge * merge, vision.in_channels * width),
            "image_grid_thw": torch.tensor([[1, merge, merge]]),
        }

    def count(self, vision: Mapping[str, Tensor]) -> int:
        return len(vision["image_grid_thw"]) if vision else 0

    def check(self, model: Any) -> None:
        super().check(model)
        text = model.config.get_text_config()
        if text.model_type != "qwen3_vl_moe_text":
            return
        width, inner = text.hidden_size, text.moe_intermediate_size
        if width in (inner, 2 * inner):
            fault = f"hidden_size {width} and moe_intermediate_size {inner} make square experts, which files in two "
            fault += "layouts hold: transformers would load the published one transposed; choose another size"
        elif getattr(text, "norm_topk_prob", None) is not True:
            fault = "norm_topk_prob must be true in its text_config: vLLM reads it, and transformers always normalises"
        elif getattr(text, "shared_expert_intermediate_size", 0):
            fault = "remove shared_expert_intermediate_size from its text_config: its layers have no shared expert, "
            fault += "and vLLM would make one without weights"
        else:
            return
        raise ConfigError(f"model.path: a {model.config.model_type} cannot be trained exactly: {fault}")


@register("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
class QwenVLProcessor(HFProcessor):
    """The processor of one Qwen-VL model, read from its folder.

    If `max_pixels` is None, the limit is IMAGE_TOKENS, and `save` writes the model's own limit.
    """

    family = QwenVLFamily()
    stable = "aspect ratios up to 200 and an area that fits data.min_pixels and data.max_pixels"
    template_tokens: ClassVar[Mapping[str, int]] = {"<|vision_start|>": 1, "<|vision_end|>": 1}
    content_as_parts = False

    def __init__(self, path: str, config: Any, **options: Any) -> None:
        super().__init__(path, config, **options)
        if options.get("video_max_pixels") is None:
            self.video_max_pixels = min(FRAME_TOKENS * self.factor**2, self.max_pixels)
        # time stands in the text between the pairs of frames, and not in the positions
        self.writes_times = config.model_type.startswith("qwen3")
        self.videos: Any = getattr(self.hf, "video_processor", None)  # a model's own code may have none
        for name in ("image_mean", "image_std", "patch_size", "merge_size", "temporal_patch_size"):
            image, video = (np.ravel(getattr(p, name, ())) for p in (self.hf.image_processor, self.videos))
            # vLLM normalises videos by the numbers of images
            if not np.array_equal(image, video):
                self.video_token_id = None
                self.no_video = f"{name} of its video processor is not that of its image processor"

    def media_tokens(self) -> Iterator[str]:
        yield from (self.hf.image_token, self.hf.video_token)
        yield from ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")

    def limits(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        image_processor = self.hf.image_processor
        self.factor = int(image_processor.patch_size * image_processor.merge_size)
        model_size = {edge: int(image_processor.size[edge]) for edge in ("shortest_edge", "longest_edge")}
        lowest, highest = model_size.values()
        low = int(min_pixels or lowest)
        high = int(max_pixels or max(min(highest, IMAGE_TOKENS * self.factor**2), lowest))
        image_processor.size = {"shortest_edge": low, "longest_edge": high}
        self._saved_size = image_processor.size if max_pixels else {**model_size, "shortest_edge": low}
        return low, high

    @property
    def mm_processor_kwargs(self) -> Mapping[str, Any]:
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        return {"size": size, "videos_kwargs": self._frames_unchanged}

    @property
    def _frames_unchanged(self) -> dict[str, bool]:
        """Return arguments of the video processor that let it choose and resize no frame."""
        # transformers 5.19 warns if this is not said, and other versions do not take it
        has_cap = hasattr(self.videos, "cap_pixels_per_frame")
        return FRAMES_UNCHANGED | ({"cap_pixels_per_frame": False} if has_cap else {})

    def limited_size(self, size: Size, min_pixels: int, max_pixels: int) -> Size:
        return _rule(size, self.factor, min_pixels, max_pixels)

    def max_image_tokens(self) -> int:
        return self.max_pixels // self.factor**2

    def max_video_tokens(self, frames: int) -> int:
        pair = max(self.video_max_pixels, self.min_pixels) // self.factor**2
        if self.writes_times:
            pair += len(self.tokenizer(f"<{LATEST:.1f} seconds>", add_special_tokens=False)["input_ids"]) + 2
        return -(-frames // 2) * pair

    def video_placeholder(self) -> str:
        return str(self.hf.video_token)

    def encode(self, media: Sequence[Medium]) -> tuple[list[list[int]], dict[str, Tensor]]:
        vision = self.vision([self._patches(medium) for medium in media])
        pairs = zip(media, vision["image_grid_thw"].tolist(), strict=True)
        return [self._ids(medium, grid) for medium, grid in pairs], vision

    def _patches(self, medium: Medium) -> Mapping[str, Tensor]:
        if not isinstance(medium, Video):
            output: Mapping[str, Tensor] = self.hf.image_processor(
                [medium], do_resize=False, return_tensors="pt"
            )
            return output
        output = self.videos([frames_array(medium)], return_tensors="pt", **self._frames_unchanged)
        return {"pixel_values": output["pixel_values_videos"], "image_grid_thw": output["video_grid_thw"]}

    def _ids(self, medium: Medium, grid: Sequence[int]) -> list[int]:
        """Return the ids of a medium whose patches form a `grid` (time, height, width)."""
        time, height, width = grid
        count = height * width // self.hf.image_processor.merge_size**2
        if not isinstance(medium, Video):
            return [self.image_token_id] * count
        tokens = [int(self.tokenizer.convert_tokens_to_ids(self.hf.video_token))] * count
        if not self.writes_times:
            return tokens * time
        start, end = self.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        ids = []
        for first, last in zip(medium.times[::2], medium.times[1::2], strict=True):
            text = f"<{(first + last) / 2:.1f} seconds>"
            ids += [*self.tokenizer(text, add_special_tokens=False)["input_ids"], start, *tokens, end]
        return ids

    def _resize(self, uid: str, index: int, medium: Medium, limits: Mapping[str, int]) -> Medium:
        resized = super()._resize(uid, index, medium, limits)
        if isinstance(resized, Video) and len(resized.frames) % 2:  # a patch is of two frames
            frames, times = resized.frames, resized.times
            return replace(resized, frames=(*frames, frames[-1]), times=(*times, times[-1]))
        return resized

    def vision(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {key: torch.cat([o[key] for o in outputs]) for key in ("pixel_values", "image_grid_thw")}

    def positions(
        self, token_ids: Sequence[int], vision: Mapping[str, Tensor], media: Sequence[Medium]
    ) -> Tensor:
        """Return positions [3, L] of time, height and width: M-RoPE (arXiv:2409.12191, section 2.1).

        A text token adds 1 to the largest position before it, on all axes. The token at (t, y, x) of an image or a
        video has the position p + (floor(t * step), y, x), with p one above the largest position before it. In
        Qwen2.5-VL `step` is the seconds between two pairs of frames times the config's `tokens_per_second`
        (arXiv:2502.13923), else it is 1. In Qwen3-VL and Qwen3.5 each pair of frames is a run of its own, with t = 0.

        Not by transformers' `get_rope_index`: up to 5.19 it goes on behind a video from p + max(height, width), which
        is a position inside of the video if that is long (0.05 to 0.09 nats from vLLM, and from the definition).
        """
        blocks = self._blocks(vision, media)
        positions, at = [], 0
        medium_ids = {self.image_token_id, self.video_token_id}
        for is_medium, run in groupby(token_ids, lambda token: token in medium_ids):
            count = len(list(run))
            while count > 0:
                block = next(blocks) if is_medium else torch.arange(count).expand(3, -1)
                positions.append(block + at)
                at, count = int(positions[-1].max()) + 1, count - block.shape[1]
        return torch.cat(positions, 1)

    def _blocks(self, vision: Mapping[str, Tensor], media: Sequence[Medium]) -> Iterator[Tensor]:
        """Yield positions [3, tokens], from 0, of each run of tokens of the media."""
        sizes, merge = self.config.vision_config, self.hf.image_processor.merge_size
        for medium, grid in zip(media, vision["image_grid_thw"].tolist() if media else (), strict=True):
            time, height, width = grid[0], grid[1] // merge, grid[2] // merge
            step, runs = 1.0, 1
            if isinstance(medium, Video) and self.writes_times:
                time, runs = 1, time
            elif isinstance(medium, Video) and (rate := getattr(sizes, "tokens_per_second", None)):
                # from these numbers and in float32, as engines have it: floor could differ
                fps = VideoMetadata(**video_metadata(medium)).sampled_fps
                step = float(np.float32(self.videos.temporal_patch_size / fps)) * rate
            block = torch.from_numpy(np.indices((time, height, width)).reshape(3, -1))
            block[0] = (block[0] * step).long()
            yield from [block] * runs

    def save(self, path: str | Path) -> None:
        size, self.hf.image_processor.size = self.hf.image_processor.size, self._saved_size
        try:
            super().save(path)
        finally:
            self.hf.image_processor.size = size


def fixed_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """Return the (height, width) in pixels that the rule maps to itself, starting from the given size.

    Raises NoFixedPoint when the rule refuses the size (aspect ratio above 200) or does not settle.
    """
    return settle((height, width), lambda size: _rule(size, factor, min_pixels, max_pixels))


def _rule(size: Size, factor: int, min_pixels: int, max_pixels: int) -> Size:
    try:
        height, width = smart_resize(*size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    except ValueError as error:
        raise NoFixedPoint(f"{size[1]}x{size[0]}: {error}") from error
    return height, width
