"""Gold and predicted boxes, polygons and points of a row, in pixels of the image as the model saw it.

The page of `mm-grpo check` draws the gold ones, report.html both. `GOLD_COLUMNS` names the column that each built-in
compares with; the reward's options (`gold_space`, `gold_layout`, `image_index`) tell how to read it. A prediction is
what the built-in reads in a completion, in its `space` and `layout`. Columns of a user's own reward are not drawn. To
add a built-in: a line in `GOLD_COLUMNS`, and the way to read column and completion in `gold_polygons` and `_predicted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mm_grpo.rewards.builtins.boxes import Box, Frame, Point, boxes_in, gold_boxes, point_in
from mm_grpo.rewards.builtins.clicking import Polygon, gold_shapes, moved_shapes
from mm_grpo.rewards.registry import BUILTINS, get
from mm_grpo.rewards.spec import RewardSpec, innermost
from mm_grpo.types import Prompt

GOLD_COLUMNS = {"iou": "box", "giou": "box", "box_match": "boxes", "clicking": "target"}
"""Built-in -> column of its gold value."""
ShapesOf = Callable[[str, Mapping[str, Any], Frame], Sequence[Polygon]]
"""Function from the name of a built-in, its options and the frame of the image to shapes."""


@dataclass(frozen=True)
class Overlay:
    """Polygon, box (four points) or point (one) on an image, in its pixels."""

    image: int
    """Index of the row's image, from 0."""
    points: tuple[Point, ...]
    label: str

    def as_dict(self) -> dict[str, Any]:
        """Return the object of the rollout log, rounded to a hundredth of a pixel."""
        points = [[round(x, 2), round(y, 2)] for x, y in self.points]
        return {"image": self.image, "label": self.label, "points": points}


def gold_overlays(specs: Sequence[RewardSpec], prompt: Prompt) -> tuple[list[Overlay], list[str]]:
    """Return the gold overlays of a row, and a note for each gold value that cannot be drawn."""
    return _overlays(specs, prompt, gold_polygons, "gold_space", "original")


def predicted_overlays(specs: Sequence[RewardSpec], prompt: Prompt, completion: str) -> list[Overlay]:
    """Return the boxes and points that the rewards read in a completion; [] for a row without images."""
    # without notes: the reward itself reports wrong options
    return _overlays(specs, prompt, partial(_predicted, completion), "space", "pixel")[0]


def _overlays(
    specs: Sequence[RewardSpec], prompt: Prompt, shapes_of: ShapesOf, space: str, default: str
) -> tuple[list[Overlay], list[str]]:
    """Return the shapes of rewards in GOLD_COLUMNS that apply to a row, and the errors; none without images.

    `space` is the option of a reward that names the space of its shapes, and `default` its default.
    """
    labels: dict[tuple[int, Polygon], dict[str, None]] = {}  # names of the rewards of each shape on an image
    notes: list[str] = []
    for spec in specs if prompt.engine_prompt.images else ():
        builtin, options = builtin_name(spec) or "", {**prompt.sample.columns, **spec.bound}
        if builtin not in GOLD_COLUMNS or not spec.applies_to(prompt.sample.columns):
            continue
        try:
            index = options.get("image_index", 0)
            frame = Frame.of(prompt.engine_prompt.images, prompt.sample, index)
            shapes = shapes_of(builtin, options, frame)
            for points in moved_shapes(shapes, frame, options.get(space, default), "pixel"):
                labels.setdefault((index, points), {})[spec.name] = None
        except (ValueError, TypeError, OverflowError) as error:
            notes.append(f"{spec.name}: {error}")
    return [Overlay(image, points, ", ".join(names)) for (image, points), names in labels.items()], notes


def builtin_name(spec: RewardSpec) -> str | None:
    """Return the name in `BUILTINS` of a built-in reward, even if the config calls it otherwise; None for others."""
    fn = innermost(spec.fn)
    names = (name for name, module in BUILTINS.items() if module == fn.__module__)
    return next((name for name in names if innermost(get(name).fn) is fn), None)


def gold_polygons(builtin: str, options: Mapping[str, Any], frame: Frame) -> Sequence[Polygon]:
    """Return the gold shapes of a row in their own space. ValueError or TypeError if the reward cannot read them."""
    column, space = GOLD_COLUMNS[builtin], options.get("gold_space", "original")
    layout, value = options.get("gold_layout", "xyxy"), options[column]
    if column == "target":
        return gold_shapes(value, frame, layout, space)
    boxes = gold_boxes(value) if column == "boxes" else [value]
    return [_corners(frame.gold(box, layout, space)) for box in boxes]


def _predicted(completion: str, builtin: str, options: Mapping[str, Any], frame: Frame) -> Sequence[Polygon]:
    """Return what a built-in reads in a completion, in the space of the model."""
    layout = options.get("layout", "xyxy")
    if builtin == "clicking":
        point = point_in(completion, layout)
        return [] if point is None else [(point,)]
    boxes = [_corners(box) for box in boxes_in(completion, layout)]
    return boxes if builtin == "box_match" else boxes[-1:]


def _corners(box: Box) -> Polygon:
    x0, y0, x1, y1 = box
    return (x0, y0), (x1, y0), (x1, y1), (x0, y1)
