"""Images over the pixels of others, which are copied when one is first written to.

Pillow's `readonly` does that for pasting, drawing and `putpixel`. By itself it refuses `load()[x, y] = ...`, and
`frombytes` writes through it.
"""

from __future__ import annotations

from typing import Any

from PIL import Image


class SharedImage(Image.Image):
    """An image whose pixels are another one's until it changes them."""

    def load(self) -> Any:
        pixels = super().load()
        return _Pixels(self) if self.readonly else pixels

    def frombytes(self, *args: Any, **settings: Any) -> None:
        self._ensure_mutable()
        super().frombytes(*args, **settings)


class _Pixels:
    """The pixels of a SharedImage by (x, y)."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image

    def __getitem__(self, xy: Any) -> Any:
        return self._image.getpixel(xy)

    def __setitem__(self, xy: Any, value: Any) -> None:
        self._image.putpixel(xy, value)


def shared(image: Image.Image) -> Image.Image:
    """An image of its own with the same pixels. One that may have a palette is copied at once: Pillow writes it into
    what is shared."""
    if image.mode in ("P", "PA", "L", "LA"):
        return image.copy()
    image.load()
    made = image._new(image.im)
    made.__class__ = SharedImage
    made.readonly = 1
    return made
