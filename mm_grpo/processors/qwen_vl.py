"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images and chat messages to prompts, and how the models are built.

They share a prompt format (`<|vision_start|><|image_pad|>...<|vision_end|>`), a resize rule and M-RoPE positions. Patch
size and position rule differ; they are read from the model's own config, image processor and `get_rope_index`.

The resize. Both sides of an image are rounded to a multiple of `factor`, and the area is kept between two limits
(`smart_resize` in transformers' image_processing_qwen2_vl, which vLLM calls too). Applied to its own result the rule
can change the size again, if the area is near the limits. Engines cannot be asked not to resize, so an image is resized
once, to a size that the rule maps to itself, and refused if there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mm_grpo.processors.base import register
from mm_grpo.processors.family import Family
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.processors.image_size import NoFixedPoint, Size, settle

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_TOKENS = 1280
"""Most tokens of an image if `data.max_pixels` is not set, as Qwen's model cards advise. The models' own limit is
16,384, and a 12-megapixel photo has some 15,000."""


class QwenVLFamily(Family):
    """`model.model.visual` makes features, its merger included; positions are M-RoPE.

    In Qwen3.5 most text layers are of linear attention.
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


@register("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
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
        # only the model's method for positions is used, so it gets no memory, and transformers' own gets no layers
        if self.trust_remote_code:
            with torch.device("meta"):
                self._rope: Any = AutoModel.from_config(config, trust_remote_code=True)
        else:
            cls: Any = MODEL_MAPPING[type(config)]
            self._rope = cls.__new__(cls)
            self._rope.config = config

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
        return {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}}

    def limited_size(self, size: Size, min_pixels: int, max_pixels: int) -> Size:
        return _rule(size, self.factor, min_pixels, max_pixels)

    def max_image_tokens(self) -> int:
        return self.max_pixels // self.factor**2

    def encode(self, images: Sequence[Image]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Process all images in one call of the image processor, and repeat the placeholder for each merged patch."""
        features = self.hf.image_processor(list(images), do_resize=False, return_tensors="pt")
        vision = self.vision([features])
        merge = self.hf.image_processor.merge_size**2
        counts = [int(n) // merge for n in vision["image_grid_thw"].prod(-1)]
        return [[self.image_token_id] * count for count in counts], vision

    def vision(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {key: torch.cat([o[key] for o in outputs]) for key in ("pixel_values", "image_grid_thw")}

    def positions(self, token_ids: Sequence[int], vision: Mapping[str, Tensor]) -> Tensor:
        ids = torch.tensor([token_ids])
        kinds = (ids == self.image_token_id).int()
        grid = vision.get("image_grid_thw")
        positions: Tensor = self._rope.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
        return positions[:, 0].contiguous()

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
