"""Gold and predicted boxes, polygons and points of a row, in pixels of the image as the model saw it.

The page of `mm-grpo check` draws the gold ones, report.html both. `GOLD_COLUMNS` names the column that each built-in
compares with; the reward's options (`gold_space`, `gold_layout`, `image_index`) tell how to read it. A prediction is
what the built-in reads in a completion, in its `space` and `layout`. Columns of a user's own reward are not drawn. To
add a built-in: a line in `GOLD_COLUMNS`, and the way to read column and completion in `gold_polygons` and `_predicted`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_grpo.rewards.builtins.boxes import Box, Frame, Point, boxes_in, point_in
from mm_grpo.rewards.builtins.clicking import Polygon, gold_shapes, moved_shapes
from mm_grpo.rewards.registry import BUILTINS, get
from mm_grpo.rewards.spec import RewardSpec, innermost
from mm_grpo.types import Prompt

GOLD_COLUMNS = {"iou": "box", "giou": "box", "box_match": "boxes", "clicking": "target"}
"""Built-in -> column of its gold value."""
Labels = dict[tuple[int, Polygon], dict[str, None]]
"""(index of the image, shape) -> names of the rewards that read it."""


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
    labels: Labels = {}
    notes: list[str] = []
    for spec, builtin in _drawable(specs, prompt):
        options = {**prompt.sample.columns, **spec.bound}
        try:
            index = options.get("image_index", 0)
            frame = Frame.of(prompt.engine_prompt.images, prompt.sample, index)
            space = options.get("gold_space", "original")
            shapes = gold_polygons(builtin, options, frame)
            for points in moved_shapes(shapes, frame, space, "pixel"):
                labels.setdefault((index, points), {})[spec.name] = None
        except (ValueError, TypeError, OverflowError) as error:
            notes.append(f"{spec.name}: {error}")
    return _overlays(labels), notes


def predicted_overlays(specs: Sequence[RewardSpec], prompt: Prompt, completion: str) -> list[Overlay]:
    """Return the boxes and points that the rewards read in a completion; [] for a row without images."""
    labels: Labels = {}
    for spec, builtin in _drawable(specs, prompt):
        options = spec.bound
        index, space = options.get("image_index", 0), options.get("space", "pixel")
        with suppress(ValueError, TypeError, OverflowError):  # the reward itself reports wrong options
            frame = Frame.of(prompt.engine_prompt.images, prompt.sample, index)
            shapes = _predicted(builtin, completion, options.get("layout", "xyxy"))
            for points in moved_shapes(shapes, frame, space, "pixel"):
                labels.setdefault((index, points), {})[spec.name] = None
    return _overlays(labels)


def _overlays(labels: Labels) -> list[Overlay]:
    return [Overlay(image, points, ", ".join(names)) for (image, points), names in labels.items()]


def builtin_name(spec: RewardSpec) -> str | None:
    """Return the name in `BUILTINS` of a built-in reward, even if the config calls it otherwise; None for others."""
    fn = innermost(spec.fn)
    names = (name for name, module in BUILTINS.items() if module == fn.__module__)
    return next((name for name in names if innermost(get(name).fn) is fn), None)


def _drawable(specs: Sequence[RewardSpec], prompt: Prompt) -> Iterator[tuple[RewardSpec, str]]:
    """Yield the rewards in GOLD_COLUMNS that apply to a row, with their built-in names; none without images."""
    for spec in specs if prompt.engine_prompt.images else ():
        builtin = builtin_name(spec) or ""
        if builtin in GOLD_COLUMNS and spec.applies_to(prompt.sample.columns):
            yield spec, builtin


def gold_polygons(builtin: str, options: Mapping[str, Any], frame: Frame) -> Sequence[Polygon]:
    """Return the gold shapes of a row in their own space. ValueError or TypeError if the reward cannot read them."""
    column, space = GOLD_COLUMNS[builtin], options.get("gold_space", "original")
    layout, value = options.get("gold_layout", "xyxy"), options[column]
    if column == "target":
        return gold_shapes(value, frame, layout, space)
    boxes = value if column == "boxes" else [value]
    return [_corners(frame.gold(box, layout, space)) for box in boxes]


def _predicted(builtin: str, completion: str, layout: Any) -> list[Polygon]:
    """Return what a built-in reads in a completion, in the space of the model."""
    if builtin == "clicking":
        point = point_in(completion, layout)
        return [] if point is None else [(point,)]
    boxes = [_corners(box) for box in boxes_in(completion, layout)]
    return boxes if builtin == "box_match" else boxes[-1:]


def _corners(box: Box) -> Polygon:
    x0, y0, x1, y1 = box
    return (x0, y0), (x1, y0), (x1, y1), (x0, y1)
