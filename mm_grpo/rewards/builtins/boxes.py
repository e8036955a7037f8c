"""Boxes and points: reading them from a text, converting them between coordinate spaces, overlaps of two.

The spaces, and what a coordinate counts in each:

- `pixel`       pixels of the image as the model saw it, after our resizing (Qwen2.5-VL)
- `original`    pixels of the image as the dataset holds it, upright; the space of most gold boxes
- `normalized`  shares of the image's width and height, 0 to 1
- `0-1000`      thousandths of the width and height (Qwen2-VL, Qwen3-VL, InternVL)

`Frame` converts between them with the two sizes of the row's image. Coordinates are continuous: a box
(x0, y0, x1, y1) has the width x1 - x0, the origin is the top left corner. To add a space: `_PARTS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mm_grpo.rewards.builtins.answers import check_choice, column_value, final_part

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.types import Sample

Box = tuple[float, float, float, float]
Point = tuple[float, float]
Space = Literal["pixel", "normalized", "0-1000"]
GoldSpace = Literal["original", "pixel", "normalized", "0-1000"]
Layout = Literal["xyxy", "xywh", "yxyx"]

_PARTS = {"normalized": 1.0, "0-1000": 1000.0}  # how many parts the width and the height have
_PIXELS = ("original", "pixel")
_LARGEST = 1e7  # larger numbers are not read as coordinates
_OUTSIDE = 0.1  # a gold box that leaves its image by more than this share is in another space

# Every repeat is bounded and a number starts at no digit's right: a search takes linear time.
_N = r"(?<![\d.])[-+]?(?:\d{1,9}(?:\.\d{0,17})?|\.\d{1,17})(?:[eE][-+]?\d{1,2})?(?![\d.]*\d)"
_SEP = r"(?:\s{0,4},\s{0,4}|\s{1,4})"
_OPEN, _CLOSE = r"[\[({>|]\s{0,4}", r"\s{0,4}[\])}<|]"
_BETWEEN = r"(?:\s{0,4}[\])]\s{0,4},?\s{0,4}[\[(]\s{0,4}|" + _SEP + ")"
_FOUR = f"({_N}){_SEP}({_N}){_BETWEEN}({_N}){_SEP}({_N})"
_BOX = re.compile(_OPEN + _FOUR + _CLOSE)
_BARE_BOX = re.compile(rf"\s{{0,9}}{_FOUR}\s{{0,9}}\.?\s{{0,9}}")
_TWO = f"({_N}){_SEP}({_N})"
_EQUALS, _QUOTE = r"\s{0,3}[=:]\s{0,3}", "[\"']?"
_NAMED = rf"\bx{_QUOTE}{_EQUALS}{_QUOTE}({_N}){_QUOTE}[\s,;]{{1,4}}{_QUOTE}y{_QUOTE}{_EQUALS}{_QUOTE}({_N})"
_POINT = re.compile(f"{_OPEN}{_TWO}{_CLOSE}|{_NAMED}")
_BARE_POINT = re.compile(rf"\s{{0,9}}{_TWO}\s{{0,9}}\.?\s{{0,9}}")


@dataclass(frozen=True)
class Frame:
    """Sizes (width, height) of a row's image, in pixels; None if the row has no image: both spaces are one then."""

    model_size: tuple[int, int] | None = None
    """As the model saw it, after our resizing."""
    original_size: tuple[int, int] | None = None
    """As the dataset holds it, upright."""

    @classmethod
    def of(cls, images: Sequence[Image], sample: Sample | None, image_index: int = 0) -> Frame:
        """Make the frame of the row's image `image_index`, counted from 0. Raise ValueError if the row lacks it."""
        originals = () if sample is None else sample.images
        if (images or originals) and not 0 <= image_index < max(len(images), len(originals)):
            raise ValueError(
                f"image_index={image_index}, and the row has {len(images)} image(s), counted from 0"
            )
        model_size = images[image_index].size if images else None
        original_size = originals[image_index].size if originals else None
        return cls(model_size or original_size, original_size or model_size)

    def extent(self, space: str) -> tuple[float, float]:
        """Return the width and height of the whole image in this space."""
        if space in _PARTS:
            return _PARTS[space], _PARTS[space]
        size = self.model_size if space == "pixel" else self.original_size
        if size is None:
            raise ValueError(
                f"coordinates in the space {space!r} need the image's size, and the row has no image"
            )
        return float(size[0]), float(size[1])

    def scale(self, source: str, target: str) -> tuple[float, float]:
        """Return the factors of x and y from one space to the other."""
        same_pixels = self.model_size == self.original_size and source in _PIXELS and target in _PIXELS
        if source == target or same_pixels:
            return 1.0, 1.0
        (from_x, from_y), (to_x, to_y) = self.extent(source), self.extent(target)
        return to_x / from_x, to_y / from_y

    def gold(self, value: Any, layout: Layout, space: str) -> Box:
        """Return a gold box from a column (see `gold_box`). Raise ValueError if it clearly lies outside its image."""
        box = gold_box(value, layout)
        self.check(box, space)
        return box

    def moved(self, box: Box, source: str, target: str) -> Box:
        """Return the box in another space."""
        x, y = self.scale(source, target)
        return box if (x, y) == (1.0, 1.0) else (box[0] * x, box[1] * y, box[2] * x, box[3] * y)

    def check(self, box: Box, space: str) -> None:
        """Raise ValueError if a gold box clearly does not lie in its image: its space is another one then."""
        if space in _PIXELS and self.model_size is None:
            return
        width, height = self.extent(space)
        low, high = -_OUTSIDE, 1 + _OUTSIDE
        if not (
            all(low * width <= x <= high * width for x in (box[0], box[2]))
            and all(low * height <= y <= high * height for y in (box[1], box[3]))
        ):
            raise ValueError(
                f"the gold box {box} does not lie in its image, which is {width:g} × {height:g} in the space "
                f"{space!r}; see the options gold_space and gold_layout"
            )


def check_space(space: str, gold_space: str) -> None:
    """Raise ValueError unless both are spaces."""
    check_choice("space", space, "pixel", *_PARTS)
    check_choice("gold_space", gold_space, *_PIXELS, *_PARTS)


def boxes_in(text: str, layout: Layout = "xyxy") -> list[Box]:
    """Return all boxes in a text's final part, in order: [1, 2, 3, 4], (1, 2), (3, 4), (1,2,3,4), <box>1 2 3 4</box>,
    or a text of nothing but four numbers. Numbers among words are a box only in brackets.

    >>> boxes_in('{"bbox_2d": [1, 2, 30, 40.5]} and <|box_start|>(5,6),(7,8)<|box_end|>')
    [(1.0, 2.0, 30.0, 40.5), (5.0, 6.0, 7.0, 8.0)]
    """
    part = final_part(text)
    bare = _BARE_BOX.fullmatch(part)
    candidates = (corners(match.groups(), layout) for match in ([bare] if bare else _BOX.finditer(part)))
    return [box for box in candidates if all(abs(c) <= _LARGEST for c in box)]


def point_in(text: str, layout: Layout = "xyxy") -> Point | None:
    """Return the last point in a text's final part, or the centre of a box: (1, 2), [1, 2], x=1, y=2,
    <point x="1" y="2">, or nothing but two numbers.

    >>> point_in("click(x=10, y=20)"), point_in("[0, 0, 4, 2]")
    ((10.0, 20.0), (2.0, 1.0))
    """
    part = final_part(text)
    at, point = -1, None
    bare = _BARE_POINT.fullmatch(part)
    for match in [bare] if bare else _POINT.finditer(part):
        x, y = (float(n) for n in match.groups() if n is not None)
        at, point = match.start(), (x, y)
    bare = _BARE_BOX.fullmatch(part)
    for match in [bare] if bare else _BOX.finditer(part):
        # "(1, 2), (3, 4)" is a box, although its halves read as points
        if match.end() > at:
            x0, y0, x1, y1 = corners(match.groups(), layout)
            at, point = match.end(), ((x0 + x1) / 2, (y0 + y1) / 2)
    return point if point and max(abs(point[0]), abs(point[1])) <= _LARGEST else None


def corners(numbers: Sequence[Any], layout: Layout) -> Box:
    """Return four numbers in a layout as (x0, y0, x1, y1)."""
    a, b, c, d = (float(number) for number in numbers)
    if layout == "xyxy":
        return a, b, c, d
    if layout == "yxyx":
        return b, a, d, c
    if layout == "xywh":
        return a, b, a + c, b + d
    raise ValueError(f"layout {layout!r}; legal are 'xyxy', 'xywh' (width and height) and 'yxyx'")


def boxes_of(value: Any) -> Any:
    """Return a gold column as plain Python: text that is no JSON list of numbers as the boxes in it, one box alone."""
    parsed = column_value(value)
    if isinstance(value, str) and (parsed is None or "{" in value):
        boxes = boxes_in(value)
        return boxes[0] if len(boxes) == 1 else boxes or None
    return parsed


def gold_boxes(value: Any) -> Sequence[Any]:
    """Return the gold boxes of a column: a list of them, one box, or a text. Raise ValueError for anything else."""
    boxes = boxes_of(value)
    if not isinstance(boxes, list | tuple):
        raise ValueError(f"the gold boxes are {str(value)[:80]!r}; legal is a list of boxes, perhaps empty")
    return [boxes] if boxes and is_coordinate(boxes[0]) else boxes


def gold_box(value: Any, layout: Layout = "xyxy") -> Box:
    """Return a gold box from a column: four finite numbers in a list, tuple, array or text, corners in order."""
    text, value = str(value)[:80], boxes_of(value)
    if not isinstance(value, list | tuple) or len(value) != 4 or not all(map(is_coordinate, value)):
        raise ValueError(f"the gold box is {text}; it must be four finite numbers below {_LARGEST:.0f}")
    box = corners(value, layout)
    if not has_area(box):
        raise ValueError(
            f"the gold box {box} has no area: (x0, y0) must be the top left corner and (x1, y1) the bottom "
            f"right one; see the option gold_layout"
        )
    return box


def is_coordinate(value: Any) -> bool:
    """Return True if a value is a number that a coordinate may be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def has_area(box: Box) -> bool:
    """Return True if the corners are in order and the box is not empty."""
    return box[0] < box[2] and box[1] < box[3]


def overlap(box: Box, target: Box) -> tuple[float, float, float]:
    """Return the areas of the intersection, the union and the smallest box around two boxes that have an area."""
    width = min(box[2], target[2]) - max(box[0], target[0])
    height = min(box[3], target[3]) - max(box[1], target[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in (box, target)]
    hull = (max(box[2], target[2]) - min(box[0], target[0])) * (
        max(box[3], target[3]) - min(box[1], target[1])
    )
    return shared, sum(areas) - shared, hull


def iou_of(box: Box, target: Box) -> float:
    """Return intersection over union, in [0, 1]; 0 when a box has no area.

    >>> iou_of((0, 0, 10, 10), (0, 0, 10, 20)), iou_of((0, 0, 1, 1), (1, 1, 0, 0))
    (0.5, 0.0)
    """
    if not (has_area(box) and has_area(target)):
        return 0.0
    shared, union, _ = overlap(box, target)
    return min(1.0, shared / union) if union > 0 else 0.0
