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
FINEST = 4_000
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
    resolution: int = 512,
    image_index: int = 0,
) -> float | None:
    """Intersection over union of two masks, each an RLE or polygons.

    An RLE is COCO's {"size": [height, width], "counts": ...}, compressed or not; it covers the whole image,
    whatever its size (a row without an image has the size of its gold RLE). Polygons are [x0, y0, x1, y1,
    ...], [[x0, y0], [x1, y1], ...], or a list of several, whose union counts; four numbers are a box
    (x0, y0, x1, y1). Gold may be either, as a value or as JSON text; the completion writes JSON in its
    final part (the last `<answer>` block, else what follows `</think>`, else everything), the last such
    value counts, and it may stand in a mapping under "mask", "segmentation" or "polygon". `space`,
    `gold_space` and `image_index` are those of the reward `iou`.

    Both are drawn on one grid, where a cell belongs to a shape that holds its centre (pycocotools draws, to a fifth
    of a cell): that of the gold RLE, else the image's proportions with `resolution` cells, at most 4,000, on its
    longer side. So the score of polygons is exact to about the circumference in cells divided by the area. What lies
    outside the image is cut off.

    Returns a score in [0, 1], 0.0 when no mask parses, for a predicted RLE of more than 16 million cells,
    or for more than 2,000 points; None when the row has no gold mask. ValueError when the gold mask cannot
    be read, is empty or passes these bounds. For RefCOCO's segmentations, ReasonSeg, LVIS. Needs the package
    pycocotools.

    >>> mask_iou("[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]", mask=[0, 0, 1, 0, 1, 1, 0, 1],
    ...          space="normalized", gold_space="normalized")
    0.5
    >>> mask_iou("[0, 0, 1, 1]", mask={"size": [2, 2], "counts": [0, 2, 2]}, space="normalized")
    0.5
    """
    check_space(space, gold_space)
    if not 1 <= resolution <= FINEST:
        raise ValueError(f"resolution={resolution}; it is a number of cells, at least 1 and at most {FINEST}")
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
    given = mask_in(completion)
    grid = _grid(gold, frame, resolution)
    right = _encoded(gold, frame, gold_space, grid)
    coco = library("mask_iou", ".mask")
    if right is None:
        raise ValueError(f"the gold mask is over {MOST_AROUND:,} cells around; see the option gold_space")
    if not coco.area(right):
        raise ValueError("the gold mask is empty on its grid; see the options gold_space and resolution")
    ours = None if given is None else _encoded(given, frame, space, grid)
    return 0.0 if ours is None else float(coco.iou([ours], [right], [0])[0][0])


def _grid(gold: Shape, frame: Frame, resolution: int) -> tuple[int, int]:
    """Height and width in cells."""
    if isinstance(gold, Rle):
        return gold.height, gold.width
    width, height = frame.original or (1, 1)
    longer = max(width, height)
    return max(1, round(resolution * height / longer)), max(1, round(resolution * width / longer))


def _encoded(shape: Shape, frame: Frame, space: str, grid: tuple[int, int]) -> Any:
    return encode(shape, (1.0, 1.0) if isinstance(shape, Rle) else frame.extent(space), grid)


def encode(shape: Shape, extent: tuple[float, float], grid: tuple[int, int]) -> Any:
    """The shape as pycocotools' compressed RLE on a grid of (height, width) cells; None for polygons with more
    than MOST_AROUND cells around.

    `extent` is the width and height of the whole image in the polygons' coordinates; an RLE has none.
    """
    coco = library("mask_iou", ".mask")
    height, width = grid
    if isinstance(shape, Rle):
        if (shape.height, shape.width) == grid:
            return coco.frPyObjects({"size": grid, "counts": shape.runs}, height, width)
        import numpy as np

        # another size: the cell under the centre of each of ours
        rows = (2 * np.arange(height) + 1) * shape.height // (2 * height)
        columns = (2 * np.arange(width) + 1) * shape.width // (2 * width)
        inside = np.repeat((np.arange(len(shape.runs)) % 2).astype(np.uint8), shape.runs)
        cells = inside.reshape(shape.width, shape.height).T[rows][:, columns]
        return coco.encode(np.asfortranarray(cells))
    scale = width / extent[0], height / extent[1]
    polygons = [[(x * scale[0], y * scale[1]) for x, y in polygon] for polygon in shape]
    around = sum(
        max(abs(x1 - x0), abs(y1 - y0))
        for polygon in polygons
        for (x0, y0), (x1, y1) in zip(polygon, polygon[1:] + polygon[:1], strict=True)
    )
    if around > MOST_AROUND:
        return None
    flat = [[min(max(c, -_FAR), _FAR) for point in polygon for c in point] for polygon in polygons]
    return coco.merge(coco.frPyObjects(flat, height, width))


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
