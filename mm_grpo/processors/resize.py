"""One resize per image, to a size that no later stage will change.

The Qwen-VL families round both sides to a multiple of `factor` and keep the area between two limits
(`smart_resize` in transformers' image_processing_qwen2_vl, which vLLM calls too). Applied to its own
result the rule mostly changes nothing, but not always: near the limits the area can fall outside
again. Engines cannot be told not to resize, so we walk to a fixed point and refuse an image that
has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_WALK = 16


class NoFixedPoint(ValueError):
    """The resize rule never settles for this image under these limits."""


def fixed_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in pixels that the rule maps to itself, reached from the given size.

    Raises NoFixedPoint when the rule refuses the size (aspect ratio above 200) or does not settle.
    """
    size = (height, width)
    for _ in range(MAX_WALK):
        try:
            following = smart_resize(*size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
        except ValueError as error:
            raise NoFixedPoint(f"{width}x{height}: {error}") from error
        if following == size:
            return size
        size = following
    raise NoFixedPoint(
        f"{width}x{height} pixels: no size with sides in multiples of {factor} has an area between "
        f"min_pixels {min_pixels} and max_pixels {max_pixels} at this aspect ratio"
    )


def resize_once(image: Image, *, factor: int, min_pixels: int, max_pixels: int) -> Image:
    """The image at its fixed size, by bicubic resampling; the same object when it is there already."""
    from PIL.Image import Resampling

    height, width = fixed_size(
        image.height, image.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    if (image.height, image.width) == (height, width):
        return image
    return image.resize((width, height), Resampling.BICUBIC)
