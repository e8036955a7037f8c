"""The reward `mask_iou`: masks as COCO writes them, run-length encoded (RLE) or polygons; drawn by pycocotools.

An RLE counts the cells of an image column by column, from the top left, in runs of outside and inside by turns, the
first one outside. Its compressed form writes the runs as text. Both are decoded and checked here before pycocotools
gets them: it trusts its input, and runs that do not fit their size read or write memory that is not theirs. All
sizes are bounded: an RLE to 16 million cells, polygons to 2,000 points and 500,000 cells around.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mm_grpo.rewards.builtins import library
from mm_grpo.rewards.builtins.answers import column_value, final_part
from mm_grpo.rewards.builtins.boxes import Frame, GoldSpace, Space, check_space, is_coordinate
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.types import Sample

MOST_CELLS = 16_000_000
MOST_POINTS = 2_000
MOST_AROUND = 500_000  # cells along the edges of all polygons; pycocotools holds 100 bytes for each
RESOLUTION = 512
"""Cells on the longer side of an image whose gold is polygons."""
_FAR = 1e8  # a coordinate in cells; pycocotools counts fifths of cells in 32 bits
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


@reward("mask_iou", needs=("mask",))
def mask_iou(
    completion: str,
    mask: Any,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    space: Space = "pixel",
    gold_space: GoldSpace = "original",
    image_index: int = 0,
) -> float | None:
    """Intersection over union of the completion's polygons and the gold mask.

    Gold is an RLE or polygons, as a value or as JSON text. An RLE is COCO's {"size": [height, width], "counts": ...},
    compressed or not; it covers the whole image, whatever its size (a row without an image has the size of its gold
    RLE). Polygons are [x0, y0, x1, y1, ...], [[x0, y0], [x1, y1], ...], or a list of several, whose union counts; four
    numbers are a box (x0, y0, x1, y1). The completion writes them as JSON in its final part (the last `<answer>` block,
    else what follows `</think>`, else everything), the last such value counts, and it may stand in a mapping under
    "mask", "segmentation" or "polygon". `space`, `gold_space` and `image_index` are those of the reward `iou`.

    Both are drawn on one grid, where a cell belongs to a shape that holds its centre (pycocotools draws, to a fifth
    of a cell): that of the gold RLE, else the image's proportions with 512 cells on its longer side. So the score of
    polygons is exact to about the circumference in cells divided by the area. What lies outside the image is cut off.

    Returns a score in [0, 1], 0.0 when no polygon parses or for more than 2,000 points; None when the row has no gold
    mask. ValueError when the gold mask cannot be read, is empty or passes the bounds. For RefCOCO's segmentations,
    ReasonSeg, LVIS. Needs the package pycocotools.

    >>> mask_iou("[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]", mask=[0, 0, 1, 0, 1, 1, 0, 1],
    ...          space="normalized", gold_space="normalized")
    0.5
    >>> mask_iou("[0, 0, 1, 1]", mask={"size": [2, 2], "counts": [0, 2, 2]}, space="normalized")
    0.5
    """
    check_space(space, gold_space)
    if mask is None:
        return None
    frame, gold = Frame.of(images, sample, image_index), read_mask(mask)
    if gold is None:
        raise ValueError(
            f"the gold mask is {str(mask)[:80]}; it must be an RLE with size and counts, of at most "
            f"{MOST_CELLS:,} cells, or polygons of at most {MOST_POINTS:,} points"
        )
    if isinstance(gold, Rle) and frame.original is None:
        frame = Frame((gold.width, gold.height), (gold.width, gold.height))
    given, coco = mask_in(completion), library("mask_iou", ".mask")
    if isinstance(gold, Rle):
        grid = gold.height, gold.width
        right = coco.frPyObjects({"size": grid, "counts": gold.runs}, *grid)
    else:
        grid = _grid(frame.original or (1, 1))
        right = drawn(gold, frame.extent(gold_space), grid)
    if right is None:
        raise ValueError(f"the gold mask is over {MOST_AROUND:,} cells around; see the option gold_space")
    if not coco.area(right):
        raise ValueError("the gold mask is empty on its grid; see the option gold_space")
    ours = None if given is None else drawn(given, frame.extent(space), grid)
    return 0.0 if ours is None else float(coco.iou([ours], [right], [0])[0][0])


def _grid(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width in cells, of an image of this width and height."""
    width, height = size
    longer = max(width, height)
    return max(1, round(RESOLUTION * height / longer)), max(1, round(RESOLUTION * width / longer))


def drawn(polygons: Sequence[Polygon], extent: tuple[float, float], grid: tuple[int, int]) -> Any:
    """The polygons as pycocotools' RLE on a grid of (height, width) cells; None for more than MOST_AROUND cells around.

    `extent` is the width and height of the whole image in their coordinates.
    """
    height, width = grid
    scale = width / extent[0], height / extent[1]
    polygons = [tuple((x * scale[0], y * scale[1]) for x, y in polygon) for polygon in polygons]
    around = sum(
        max(abs(x1 - x0), abs(y1 - y0))
        for polygon in polygons
        for (x0, y0), (x1, y1) in zip(polygon, polygon[1:] + polygon[:1], strict=True)
    )
    if around > MOST_AROUND:
        return None
    coco = library("mask_iou", ".mask")
    flat = [[min(max(c, -_FAR), _FAR) for point in polygon for c in point] for polygon in polygons]
    return coco.merge(coco.frPyObjects(flat, height, width))


def mask_in(text: str) -> tuple[Polygon, ...] | None:
    """The last polygons that stand as JSON in a text's final part; None without any."""
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
        shape, at = read_mask(value), end
        found = shape if isinstance(shape, tuple) else found
    return found


def read_mask(value: Any) -> Shape | None:
    """A mask from a value: an RLE, polygons, or JSON text of them; None when it is neither."""
    while isinstance(value, str | Mapping):
        if isinstance(value, str):
            value = column_value(value)
        elif "counts" in value and "size" in value:
            return _rle(value["size"], value["counts"])
        else:
            value = next((value[key] for key in _KEYS if value.get(key) is not None), None)
    polygons = _polygons(column_value(value))
    return polygons if polygons and sum(map(len, polygons)) <= MOST_POINTS else None


def _rle(size: Any, counts: Any) -> Rle | None:
    if not (isinstance(size, Sequence) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        return None
    height, width = size
    if isinstance(counts, bytes):
        counts = counts.decode("ascii", "replace")
    runs = _runs(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list | tuple) or not all(type(n) is int and n >= 0 for n in runs):
        return None
    cells = height * width
    if cells > MOST_CELLS or sum(runs) != cells or len(runs) > cells + 1:
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
    if len(value) < 4 or len(value) % 2 or not all(map(is_coordinate, value)):
        return None
    if len(value) == 4:
        x0, y0, x1, y1 = value
        if not (x0 < x1 and y0 < y1):
            return None
        return (x0, y0), (x1, y0), (x1, y1), (x0, y1)
    return tuple(zip(value[::2], value[1::2], strict=True))
