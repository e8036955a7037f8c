"""Masks: COCO's run-length encoding and polygons, read from values or text and drawn on a grid.

An `Rle` counts the cells of an image column by column, from the top left, in runs of outside and inside
by turns, the first one outside. Its compressed form writes the runs as text, six bits a character.
Here `[h, w]` is a boolean numpy array of height and width; numpy is imported when a mask is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mm_grpo.rewards.builtins.answers import final_part

if TYPE_CHECKING:
    from numpy import bool_
    from numpy.typing import NDArray

MOST_CELLS = 16_000_000
MOST_POINTS = 2_000
_TRIES = 20  # how many places of a text are tried as the start of JSON that turn out not to be one
_KEYS = ("mask", "segmentation", "polygon", "polygons")

Polygon = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Rle:
    """A run-length encoded mask: its size in cells and its runs, which add up to height × width."""

    height: int
    width: int
    runs: tuple[int, ...]


Shape = Rle | tuple[Polygon, ...]


def mask_in(text: str) -> Shape | None:
    """The last mask that stands as JSON in a text's final part; None without one."""
    part = final_part(text)
    decoder, at, tries, found = json.JSONDecoder(), 0, 0, None
    while tries < _TRIES:
        starts = [i for i in (part.find("[", at), part.find("{", at)) if i >= 0]
        if not starts:
            break
        at = min(starts)
        try:
            value, end = decoder.raw_decode(part, at)
        except (ValueError, RecursionError):  # RecursionError: 100,000 opening brackets
            at, tries = at + 1, tries + 1
            continue
        found, at = read_mask(value) or found, end
    return found


def read_mask(value: Any) -> Shape | None:
    """A mask from a value: an RLE, polygons, or JSON text of them; None when it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, Mapping):
        if "counts" in value and "size" in value:
            return _rle(value["size"], value["counts"])
        return next((read_mask(value[key]) for key in _KEYS if value.get(key) is not None), None)
    polygons = _polygons(value.tolist() if hasattr(value, "tolist") else value)
    return polygons if polygons and sum(map(len, polygons)) <= MOST_POINTS else None


def render(shape: Shape, extent: tuple[float, float], grid: tuple[int, int]) -> NDArray[bool_]:
    """The mask [h, w] of a shape on a grid of (height, width) cells.

    `extent` is the width and height of the whole image in the polygons' coordinates; an RLE has none.
    """
    import numpy as np

    height, width = grid
    if isinstance(shape, Rle):
        inside = np.repeat(np.arange(len(shape.runs)) % 2 == 1, np.array(shape.runs, dtype=np.int64))
        drawn = inside.reshape(shape.width, shape.height).T
        if (shape.height, shape.width) == grid:
            return drawn
        # another size: the cell under the centre of each of ours
        rows = (2 * np.arange(height) + 1) * shape.height // (2 * height)
        columns = (2 * np.arange(width) + 1) * shape.width // (2 * width)
        return np.asarray(drawn[rows][:, columns])
    mask = np.zeros(grid, dtype=bool)
    for polygon in shape:
        points = np.array(polygon, dtype=np.float64) * (width / extent[0], height / extent[1])
        mask |= _fill(points, height, width)
    return mask


def _fill(points: Any, height: int, width: int) -> NDArray[bool_]:
    """The cells whose centre lies inside a polygon, by the even-odd rule.

    On each row of centres, an edge that crosses it flips all cells to the right of the crossing; so the
    first such cell is marked, and the running sum of the marks is odd inside.
    """
    import numpy as np

    marks = np.zeros((height, width + 1), dtype=np.int64)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
        if y0 == y1:
            continue
        if y0 > y1:
            x0, y0, x1, y1 = x1, y1, x0, y0
        first = max(0, math.ceil(y0 - 0.5))  # rows whose centre y is in [y0, y1)
        last = min(height, math.ceil(y1 - 0.5))
        if first >= last:
            continue
        rows = np.arange(first, last)
        crossings = x0 + (rows + 0.5 - y0) * ((x1 - x0) / (y1 - y0))
        cells = np.clip(np.ceil(crossings - 0.5), 0, width).astype(np.int64)
        marks[rows, cells] += 1  # each row once per edge, so plain indexing adds them all
    return np.asarray(np.cumsum(marks[:, :width], axis=1) % 2 == 1)


def _rle(size: Any, counts: Any) -> Rle | None:
    if not (isinstance(size, Sequence) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        return None
    height, width = size
    if isinstance(counts, bytes):
        counts = counts.decode("ascii", "replace")
    runs = _runs(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list | tuple) or not all(type(n) is int and n >= 0 for n in runs):
        return None
    if height * width > MOST_CELLS or sum(runs) != height * width:
        return None
    return Rle(height, width, tuple(runs))


def _runs(text: str) -> list[int] | None:
    """The runs of a compressed RLE: five bits a character from the lowest up, offset by 48, a sixth bit on
    all but the last; from the fourth run on, each is written as the difference to the one two before."""
    runs: list[int] = []
    value, shift = 0, 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 60:
            return None
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value, shift = 0, 0
    return runs if shift == 0 else None


def _polygons(value: Any) -> tuple[Polygon, ...] | None:
    if not isinstance(value, list | tuple) or not value:
        return None
    if (one := _polygon(value)) is not None:
        return (one,)
    several = [_polygon(part) for part in value]
    return tuple(part for part in several if part) if all(several) else None


def _polygon(value: Any) -> Polygon | None:
    """One polygon from a flat list of coordinates or a list of points; four numbers are a box."""
    if not isinstance(value, list | tuple):
        return None
    if value and all(isinstance(point, list | tuple) and len(point) == 2 for point in value):
        value = [number for point in value for number in point]
    if len(value) < 4 or len(value) % 2 or not all(_is_coordinate(number) for number in value):
        return None
    if len(value) == 4:
        x0, y0, x1, y1 = value
        if not (x0 < x1 and y0 < y1):
            return None
        return (x0, y0), (x1, y0), (x1, y1), (x0, y1)
    return tuple(zip(value[::2], value[1::2], strict=True))


def _is_coordinate(number: Any) -> bool:
    return type(number) in (int, float) and abs(number) <= 1e7  # also false for NaN
