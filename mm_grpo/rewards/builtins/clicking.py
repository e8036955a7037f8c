"""The reward `clicking`: a point against a gold box or polygon, and the geometry that it needs.

Points, boxes and coordinate spaces are read as in `boxes.py`. A point on the edge is inside. A polygon that crosses
itself contains the points from which a ray crosses an odd number of edges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.rewards.builtins.boxes import (
    Box,
    Frame,
    Layout,
    Point,
    boxes_of,
    has_area,
    is_coordinate,
    point_in,
)
from mm_grpo.rewards.builtins.grounding import box_options, takes_box_options
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.types import Sample

Polygon = tuple[Point, ...]

ON_EDGE = 1e-9
"""Distance from an edge, as a share of the polygon's size, up to which a point lies on it."""


@reward("clicking", needs=("target",))
@takes_box_options
def clicking(
    completion: str,
    target: Any,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    reach: float | None = None,
    **spaces: Any,
) -> float | None:
    """Nearness of the completion's last point to the gold box or polygon; 1 inside.

    The gold column is a box of four numbers (in `gold_layout`), a polygon ([x0, y0, x1, y1, x2, y2, ...] or [[x0, y0],
    [x1, y1], ...]), or a list of polygons, any of which counts; JSON text is read too. A point is read from the final
    part (the last `<answer>` block, else what follows `</think>`, else everything): (x, y), [x, y], x=1, y=2,
    <point x="1" y="2"> or nothing but two numbers. A box (in `layout`) counts as its centre. `space`, `gold_space`
    and `image_index` mean the same as in the reward `iou`. Edges are inside.

    Without `reach` a point outside scores 0. With it the score falls linearly with the distance from the shape, from
    1 at its edge to 0 at `reach`, which is a share of the image's diagonal (0.1 is a tenth). Distances are measured
    in pixels of the image as the model saw it; without an image, in the space of the answer.

    Returns a score in [0, 1] (1.0 or 0.0 without reach), 0.0 when no point parses; None when the row has no gold
    shape. ValueError when the gold shape cannot be read, has no extent or does not lie in its image, or reach is not
    in (0, 1]. For clicks on screens and pointing: ScreenSpot, OS-Atlas, Mind2Web, PixMo-Points with areas.

    >>> clicking("click(x=15, y=10)", target=[10, 10, 20, 20]), clicking("(9, 1)", target=[0, 0, 10, 0, 0, 10])
    (1.0, 1.0)
    >>> clicking("(0.5, 0.75)", target=[0.4, 0.2, 0.6, 0.5], space="normalized", gold_space="normalized", reach=0.5)
    0.6464466094067263
    """
    if reach is not None and not 0 < reach <= 1:
        raise ValueError(f"reach={reach}; it is a share of the image's diagonal in (0, 1]")
    if target is None:
        return None
    frame, space, gold_space, layout, gold_layout = box_options(images, sample, **spaces)
    shapes = moved_shapes(gold_shapes(target, frame, gold_layout, gold_space), frame, gold_space, space)
    distance_space = "pixel" if frame.model_size is not None else space
    diagonal = 0.0 if reach is None else math.hypot(*frame.extent(distance_space))
    point = point_in(completion, layout)
    if point is None:
        return 0.0
    if any(is_inside(point, shape) for shape in shapes):
        return 1.0
    if reach is None:
        return 0.0
    x, y = frame.scale(space, distance_space)
    nearest = min(
        _to_edge((point[0] * x, point[1] * y), shape)
        for shape in moved_shapes(shapes, frame, space, distance_space)
    )
    return max(0.0, 1.0 - nearest / (reach * diagonal))


def gold_shapes(value: Any, frame: Frame, layout: Layout, space: str) -> tuple[Polygon, ...]:
    """Return the polygons of a gold column, a box as four corners.

    Raise ValueError if it holds no polygon, or one that has no extent or does not lie in the image.
    """
    text, value = str(value)[:80], boxes_of(value)
    if isinstance(value, list | tuple) and len(value) == 4 and all(isinstance(n, int | float) for n in value):
        x0, y0, x1, y1 = frame.gold(value, layout, space)
        return (((x0, y0), (x1, y0), (x1, y1), (x0, y1)),)
    single = _polygon(value)
    polygons = (single,) if single else tuple(map(_polygon, value if isinstance(value, list | tuple) else ()))
    shapes = tuple(polygon for polygon in polygons if polygon)
    if not shapes or len(shapes) < len(polygons):
        raise ValueError(
            f"the gold target is {text}; it must be a box of four numbers, or a polygon of at least three "
            "points as [x0, y0, x1, y1, x2, y2] or [[x0, y0], [x1, y1], [x2, y2]]"
        )
    for shape in shapes:
        box = bounds(shape)
        if not has_area(box):
            raise ValueError(f"the gold target {text} has no extent")
        frame.check(box, space)
    return shapes


def _polygon(value: Any) -> Polygon | None:
    """Return a polygon from a flat list of coordinates or a list of points; None from anything else."""
    if isinstance(value, list | tuple) and value and all(isinstance(point, list | tuple) for point in value):
        value = [number for point in value for number in point] if all(len(p) == 2 for p in value) else None
    if not isinstance(value, list | tuple) or len(value) < 6 or len(value) % 2:
        return None
    return tuple(zip(value[::2], value[1::2], strict=True)) if all(map(is_coordinate, value)) else None


def moved_shapes(shapes: Sequence[Polygon], frame: Frame, source: str, target: str) -> tuple[Polygon, ...]:
    """Return the polygons in another space."""
    x, y = frame.scale(source, target)
    return tuple(tuple((px * x, py * y) for px, py in shape) for shape in shapes)


def bounds(polygon: Polygon) -> Box:
    """Return the smallest box around a polygon."""
    xs, ys = [x for x, _ in polygon], [y for _, y in polygon]
    return min(xs), min(ys), max(xs), max(ys)


def is_inside(point: Point, polygon: Polygon) -> bool:
    """Return True if a point lies in a polygon or on its edge.

    >>> is_inside((1, 1), ((0, 0), (4, 0), (0, 4))), is_inside((3, 3), ((0, 0), (4, 0), (0, 4)))
    (True, False)
    """
    x, y = point
    x0, y0, x1, y1 = bounds(polygon)
    if not (x0 <= x <= x1 and y0 <= y <= y1):
        return False
    inside = False
    for (ax, ay), (bx, by) in _edges(polygon):
        if (ay > y) != (by > y) and x < ax + (y - ay) * (bx - ax) / (by - ay):
            inside = not inside
    return inside or _to_edge(point, polygon) <= ON_EDGE * max(x1 - x0, y1 - y0)


def point_inside(polygon: Polygon) -> Point:
    """Return a point in a polygon, away from its edges; the centre of a box.

    Take the tallest band between neighbouring heights of corners. On its middle line, return the middle of the widest
    stretch that is inside.

    >>> point_inside(((0, 0), (4, 0), (4, 2), (0, 2)))
    (2.0, 1.0)
    """
    heights = sorted({y for _, y in polygon})
    _, y = max((high - low, (low + high) / 2) for low, high in itertools.pairwise(heights))
    crossings = sorted(
        ax + (y - ay) * (bx - ax) / (by - ay)
        for (ax, ay), (bx, by) in _edges(polygon)
        if (ay > y) != (by > y)
    )
    _, x = max((b - a, (a + b) / 2) for a, b in zip(crossings[::2], crossings[1::2], strict=True))
    return x, y


def _edges(polygon: Polygon) -> list[tuple[Point, Point]]:
    return list(zip(polygon, polygon[1:] + polygon[:1], strict=True))


def _to_edge(point: Point, polygon: Polygon) -> float:
    """Return the distance of a point from the nearest edge."""
    shortest = math.inf
    for (ax, ay), (bx, by) in _edges(polygon):
        dx, dy = bx - ax, by - ay
        length = dx * dx + dy * dy
        at = ((point[0] - ax) * dx + (point[1] - ay) * dy) / length if length > 0 else 0.0
        at = min(1.0, max(0.0, at))
        shortest = min(shortest, math.hypot(point[0] - ax - at * dx, point[1] - ay - at * dy))
    return shortest
