"""The built-in environment `Zoom`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image


class Zoom:
    """Environment that shows parts of the row's images at full resolution."""

    def reset(self, images: Sequence[Image.Image]) -> None:
        self._images = list(images)

    def zoom(self, bbox: list[float], image: int = 0) -> Any:
        """Look at a part of an image at full resolution.

        Args:
            bbox: The part as [left, top, right, bottom], in thousandths of the image's width and height.
            image: Which image, counted from 0.
        """
        if not isinstance(image, int) or not 0 <= image < len(self._images):
            raise ValueError(f"image is {image!r}; there are {len(self._images)}, counted from 0")
        picture = self._images[image]
        left, top, right, bottom = _box(bbox, picture.size)
        return picture.crop((left, top, right, bottom))


def _box(bbox: Any, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Convert thousandths of an image to pixels, at least one per side."""
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(isinstance(x, int | float) for x in bbox):
        raise ValueError(f"bbox is {bbox!r}; it must be [left, top, right, bottom]")
    if not (0 <= bbox[0] < bbox[2] <= 1000 and 0 <= bbox[1] < bbox[3] <= 1000):
        raise ValueError(f"bbox is {bbox}; its sides must go up, between 0 and 1000")
    width, height = size
    left, top = int(bbox[0] * width / 1000), int(bbox[1] * height / 1000)
    right, bottom = round(bbox[2] * width / 1000), round(bbox[3] * height / 1000)
    return left, top, max(right, left + 1), max(bottom, top + 1)
