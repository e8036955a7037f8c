"""Pictures that are drawn, or decoded, when their pixels are first read.

A task of drawn images has thousands of rows, of which a step uses a few: a run would draw them all before its first
step. `LazyImage` knows its size, and draws in whatever reads it, which is mostly a thread that prepares prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps


class LazyImage(Image.Image):
    """Image of `size` (width, height) pixels that `draw` returns when it is first read.

    When it is read, copied, compared or pickled, it becomes an ordinary `PIL.Image.Image`: Pillow calls `load` before
    it touches pixels. `draw` must return the same pixels each time: two threads may call it at once.
    """

    def __init__(self, size: tuple[int, int], draw: Callable[[], Image.Image], mode: str = "RGB") -> None:
        super().__init__()
        self._mode, self._size = mode, size
        self._draw = draw

    def load(self) -> Any:
        """Draw on the first call. Return Pillow's access to the pixels."""
        draw = vars(self).get("_draw")
        if draw is not None:  # else another thread has drawn after this one looked the method up
            image = draw()
            if (image.mode, image.size) != (self._mode, self._size):
                raise ValueError(f"draw returned {image.mode} {image.size}, not {self._mode} {self._size}")
            self.im, self.palette, self.info = image.im, image.palette, image.info
            self.__class__ = Image.Image  # type: ignore[assignment]
            vars(self).pop("_draw", None)
        return Image.Image.load(self)

    # both methods look at the class before Pillow reads a pixel, and drawing changes the class

    def __eq__(self, other: object) -> bool:
        self.load()
        if isinstance(other, LazyImage):
            other.load()
        return Image.Image.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # as Pillow's

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.load()
        return object.__reduce_ex__(self, protocol)


def with_pil_images(value: Any) -> Any:
    """Return a value of a row, or a list of them, with each encoded `datasets.Image` as the upright picture in it.

    A mapping that holds no image stays as it is.
    """
    if isinstance(value, list):
        return [with_pil_images(inner) for inner in value]
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        with suppress(OSError, TypeError):
            if value["bytes"] is None:  # a look at the header: a video may be larger than the memory
                Image.open(value["path"]).close()
            data = Path(value["path"]).read_bytes() if value["bytes"] is None else value["bytes"]
            size, mode = _size_and_mode(data)
            return LazyImage(size, lambda: ImageOps.exif_transpose(Image.open(BytesIO(data))), mode)
    return value


@lru_cache(maxsize=8)  # the completions of a prompt ask for the same, and a WebP's header takes milliseconds
def _size_and_mode(data: bytes) -> tuple[tuple[int, int], str]:
    image = Image.open(BytesIO(data))
    # a PNG without "exif" would be decoded to look for its orientation; from 5 on it lies on its side
    on_its_side = (image.format != "PNG" or "exif" in image.info) and image.getexif().get(0x0112, 1) > 4
    return image.size[::-1] if on_its_side else image.size, image.mode
