"""Environments that ship: pictures to look closer at, and a small world to walk in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


class Zoom:
    """The row's images at full resolution, of which the model asks for parts."""

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


class GridWorld:
    """A square grid that is drawn after every move: reach the goal. Its reward is 1 for the goal, less 0.5 for the
    share of the allowed moves that were used; 0 without the goal.

    A row may give `size` (cells of a side, default 4), `seed` (where start and goal lie) and `moves` (most moves).
    """

    CELL = 28

    def reset(self, size: int = 4, seed: int = 0, moves: int = 8, **row: Any) -> list[dict[str, Any]]:
        self._size, self._most, self._used, self.done = int(size), int(moves), 0, False
        cells = [(x, y) for x in range(self._size) for y in range(self._size)]
        self._at, self._goal = random.Random(f"grid world/{seed}").sample(cells, 2)
        return [self._shown(), {"type": "text", "text": "You are the blue disc; the goal is green."}]

    def move(self, direction: str) -> Any:
        """Go one cell.

        Args:
            direction: Where to. (choices: ["up", "down", "left", "right"])
        """
        if direction not in DIRECTIONS:
            raise ValueError(f"direction is {direction!r}; legal are {', '.join(DIRECTIONS)}")
        (x, y), (dx, dy) = self._at, DIRECTIONS[direction]
        self._at = (min(max(x + dx, 0), self._size - 1), min(max(y + dy, 0), self._size - 1))
        self._used += 1
        self.done = self._at == self._goal or self._used >= self._most
        return [self._shown(), {"type": "text", "text": "goal reached" if self._at == self._goal else ""}]

    def get_reward(self) -> float:
        return 1 - 0.5 * self._used / self._most if self._at == self._goal else 0.0

    def _shown(self) -> dict[str, Any]:
        side = self._size * self.CELL
        picture = Image.new("RGB", (side, side), "white")
        draw = ImageDraw.Draw(picture)
        for n in range(self._size + 1):
            draw.line([(n * self.CELL, 0), (n * self.CELL, side)], "gray")
            draw.line([(0, n * self.CELL), (side, n * self.CELL)], "gray")
        for (x, y), colour, shape in (
            (self._goal, "green", draw.rectangle),
            (self._at, "blue", draw.ellipse),
        ):
            left, top, size = x * self.CELL + 5, y * self.CELL + 5, self.CELL - 11
            shape([left, top, left + size, top + size], fill=colour)
        return {"type": "image", "image": picture}


def _box(bbox: Any, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Thousandths of an image to pixels, at least one of each side."""
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(isinstance(x, int | float) for x in bbox):
        raise ValueError(f"bbox is {bbox!r}; it must be [left, top, right, bottom]")
    if not (0 <= bbox[0] < bbox[2] <= 1000 and 0 <= bbox[1] < bbox[3] <= 1000):
        raise ValueError(f"bbox is {bbox}; its sides must go up, between 0 and 1000")
    width, height = size
    left, top = int(bbox[0] * width / 1000), int(bbox[1] * height / 1000)
    right, bottom = round(bbox[2] * width / 1000), round(bbox[3] * height / 1000)
    return left, top, max(right, left + 1), max(bottom, top + 1)
