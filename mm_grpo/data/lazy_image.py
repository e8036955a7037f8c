"""Pictures that are drawn when their pixels are first read.

A task of drawn images has thousands of rows, of which a step uses a few: a run would draw them all before its first
step. `LazyImage` knows its size, and draws in whatever reads it, which is mostly a thread that prepares prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image


class LazyImage(Image.Image):
    """RGB image of `size` (width, height) pixels that `draw` returns when it is first read.

    When it is read, copied, compared or pickled, it becomes an ordinary `PIL.Image.Image`: Pillow calls `load` before
    it touches pixels. `draw` must return the same pixels each time: two threads may call it at once.
    """

    def __init__(self, size: tuple[int, int], draw: Callable[[], Image.Image]) -> None:
        super().__init__()
        self._mode, self._size = "RGB", size
        self._draw = draw

    def load(self) -> Any:
        """Draw on the first call. Return Pillow's access to the pixels."""
        draw = vars(self).get("_draw")
        if draw is not None:  # else another thread has drawn after this one looked the method up
            image = draw()
            if (image.mode, image.size) != (self._mode, self._size):
                raise ValueError(f"draw returned {image.mode} {image.size}, not {self._mode} {self._size}")
            self.im = image.im
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
