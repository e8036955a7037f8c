"""Images that share another image's pixels, and copy them when first written to.

Pillow's `readonly` does that for pasting, drawing and `putpixel`. Two gaps are closed here: it refuses
`load()[x, y] = ...`, and `frombytes` writes into the shared pixels.
"""

from __future__ import annotations

from typing import Any

from PIL import Image


class SharedImage(Image.Image):
    """Image whose pixels are another one's until it changes them."""

    def load(self) -> Any:
        pixels = super().load()
        return _Pixels(self) if self.readonly else pixels

    def frombytes(self, *args: Any, **settings: Any) -> None:
        self._ensure_mutable()
        super().frombytes(*args, **settings)


class _Pixels:
    """Pixels of a SharedImage by (x, y)."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image

    def __getitem__(self, xy: Any) -> Any:
        return self._image.getpixel(xy)

    def __setitem__(self, xy: Any, value: Any) -> None:
        self._image.putpixel(xy, value)


def shared(image: Image.Image) -> Image.Image:
    """Return an independent image with the same pixels."""
    if image.mode in ("P", "PA", "L", "LA"):  # Pillow would write a palette into the shared pixels
        return image.copy()
    image.load()
    view = image._new(image.im)
    view.__class__ = SharedImage
    view.readonly = 1
    return view
