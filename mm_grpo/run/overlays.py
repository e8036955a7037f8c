"""Where the gold and the predicted boxes, polygons and points of a row lie on its images, in pixels of the image as the
model saw it. The page of `mm-grpo check` draws the gold ones, report.html both.

What is gold, and in which space, is what the config says: `OVERLAID` names the column that each built-in compares with,
and the reward's own options (`gold_space`, `gold_layout`, `image_index`) say how it is read. What is predicted is what
the same built-in reads in a completion, in its `space` and `layout`. A reward of the user's own has no known form, so
its columns are not drawn. To add a built-in: a line in `OVERLAID`; in `_of_reward` and `_predicted`, how column and
completion are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_grpo.rewards.builtins.boxes import Box, Frame, Point, boxes_in, point_in
from mm_grpo.rewards.builtins.clicking import gold_shapes, moved_shapes
from mm_grpo.rewards.builtins.masks import Polygon, mask_in, read_mask
from mm_grpo.rewards.registry import BUILTINS, get
from mm_grpo.rewards.spec import RewardSpec, innermost
from mm_grpo.types import Prompt

OVERLAID = {
    "iou": "box",
    "giou": "box",
    "box_match": "boxes",
    "clicking": "target",
    "mask_iou": "mask",
}
"""Built-in → the column that holds its gold."""
MOST = 500
"""Overlays of one row; a page of more is of no use."""
MOST_PREDICTED = 50
"""Overlays of one completion: a model may write a box in every line."""


Places = Iterator[tuple[int, tuple[Point, ...]]]
"""Images and shapes on them."""
Labels = dict[tuple[int, tuple[Point, ...]], dict[str, None]]
"""The names of the rewards that read each."""


@dataclass(frozen=True)
class Overlay:
    """A polygon (a box has four corners), or a point where `points` is one; pixels of image number `image`, from 0."""

    image: int
    points: tuple[Point, ...]
    label: str

    def as_dict(self) -> dict[str, Any]:
        """As the rollout log keeps it; a hundredth of a pixel is enough to draw."""
        points = [[round(x, 2), round(y, 2)] for x, y in self.points]
        return {"image": self.image, "label": self.label, "points": points}


def gold_overlays(specs: Sequence[RewardSpec], prompt: Prompt) -> tuple[list[Overlay], list[str]]:
    """The overlays of a row, and a note for each gold that cannot be drawn. Rewards with the same gold share one."""
    labels: Labels = {}
    notes: list[str] = []
    for name, places in _sources(specs, prompt):
        try:
            for place in places:
                labels.setdefault(place, {})[name] = None
        except (ValueError, TypeError, OverflowError) as error:
            notes.append(f"{name}: {error}")
    if len(labels) > MOST:
        notes.append(f"{len(labels) - MOST} more of the {len(labels)} gold boxes and points are not drawn")
    return _overlays(labels)[:MOST], notes


def predicted_overlays(specs: Sequence[RewardSpec], prompt: Prompt, completion: str) -> list[Overlay]:
    """What the run's rewards read in a completion: the box or the point that counts, or all that do. Rewards that read
    the same share one. Nothing where the row has no image, or where its reward does not apply."""
    images = prompt.engine_prompt.images
    labels: Labels = {}
    for spec in specs if images else ():
        name = builtin_name(spec) or ""
        if name not in OVERLAID or not spec.applies_to(prompt.sample.columns):
            continue
        options = spec.bound
        index, space = options.get("image_index", 0), options.get("space", "pixel")
        with suppress(
            ValueError, TypeError, OverflowError
        ):  # the reward itself says what is wrong with its options
            frame = Frame.of(images, prompt.sample, index)
            found = _predicted(name, completion, options.get("layout", "xyxy"))
            for points in moved_shapes(found[-MOST_PREDICTED:], frame, space, "pixel"):
                labels.setdefault((index, points), {})[spec.name] = None
    return _overlays(labels)


def _overlays(labels: Labels) -> list[Overlay]:
    return [Overlay(image, points, ", ".join(names)) for (image, points), names in labels.items()]


def _predicted(name: str, completion: str, layout: Any) -> list[Polygon]:
    """What a built-in reads in a completion, in the space of the model."""
    if name == "clicking":
        point = point_in(completion, layout)
        return [] if point is None else [(point,)]
    if name == "mask_iou":
        return list(mask_in(completion) or ())
    boxes = [_corners(box) for box in boxes_in(completion, layout)]
    return boxes if name == "box_match" else boxes[-1:]


def builtin_name(spec: RewardSpec) -> str | None:
    """The name in `BUILTINS` of a reward that ships, whatever the config calls it."""
    fn = innermost(spec.fn)
    there = (name for name, place in BUILTINS.items() if place == fn.__module__)
    return next((name for name in there if innermost(get(name).fn) is fn), None)


def _sources(specs: Sequence[RewardSpec], prompt: Prompt) -> Iterator[tuple[str, Places]]:
    if not prompt.engine_prompt.images:
        return
    for spec in specs:
        column = OVERLAID.get(builtin_name(spec) or "")
        if column is not None and spec.applies_to(prompt.sample.columns):
            yield spec.name, _of_reward(column, {**prompt.sample.columns, **spec.bound}, prompt)


def _of_reward(column: str, options: Mapping[str, Any], prompt: Prompt) -> Places:
    image = options.get("image_index", 0)
    frame = Frame.of(prompt.engine_prompt.images, prompt.sample, image)
    layout, space = options.get("gold_layout", "xyxy"), options.get("gold_space", "original")
    value = options[column]
    if column == "mask":
        shapes = read_mask(value)
        if not isinstance(shapes, tuple):
            raise ValueError("the gold mask is an RLE, or cannot be read, and is not drawn")
    elif column == "target":
        shapes = gold_shapes(value, frame, layout, space)
    else:
        boxes = value if column == "boxes" else [value]
        shapes = tuple(_corners(frame.gold(box, layout, space)) for box in boxes)
    for points in moved_shapes(shapes, frame, space, "pixel"):
        yield image, points


def _corners(box: Box) -> Polygon:
    x0, y0, x1, y1 = box
    return (x0, y0), (x1, y0), (x1, y1), (x0, y1)
