"""Rewards for grounding: `iou`, `giou` and `box_match`.

Boxes are (x0, y0, x1, y1). `boxes.py` reads them from a text and converts coordinate spaces. These rewards and
`clicking` share options, which `box_options` declares: their `**spaces` stands for its keyword-only parameters, in
`inspect.signature` and so in configs and docs too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mm_grpo.rewards.builtins.boxes import (
    Box,
    Frame,
    GoldSpace,
    Layout,
    Space,
    boxes_in,
    check_space,
    gold_boxes,
    has_area,
    iou_of,
    overlap,
)
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.types import Sample

F = TypeVar("F", bound=Callable[..., Any])

MAX_BOXES = 100


class BoxOptions(NamedTuple):
    """Frame of a row's image, and the spaces and layouts of the model's and of the gold boxes."""

    frame: Frame
    space: Space
    gold_space: GoldSpace
    layout: Layout
    gold_layout: Layout

    def gold(self, box: Any) -> Box:
        """Return a gold box in the model's space. Raise ValueError if it has no area or does not lie in its image."""
        gold = self.frame.gold(box, self.gold_layout, self.gold_space)
        return self.frame.moved(gold, self.gold_space, self.space)


def box_options(
    images: Sequence[Image],
    sample: Sample | None,
    *,
    space: Space = "pixel",
    gold_space: GoldSpace = "original",
    layout: Layout = "xyxy",
    gold_layout: Layout = "xyxy",
    image_index: int = 0,
) -> BoxOptions:
    """Return the options that rewards of boxes share. Raise ValueError if a space is unknown or the image missing."""
    check_space(space, gold_space)
    return BoxOptions(Frame.of(images, sample, image_index), space, gold_space, layout, gold_layout)


def takes_box_options(fn: F) -> F:
    """Replace the function's `**spaces` by the options of `box_options`, for `inspect.signature`."""
    signature = inspect.signature(fn)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [p for p in inspect.signature(box_options).parameters.values() if p.kind is p.KEYWORD_ONLY]
    fn.__signature__ = signature.replace(parameters=[*parameters, *shared])  # type: ignore[attr-defined]
    return fn


@reward("iou", needs=("box",))
@takes_box_options
def iou(
    completion: str,
    box: Any,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    threshold: float | None = None,
    **spaces: Any,
) -> float | None:
    """Intersection over union of the completion's last box and the gold box.

    `space` is the space of the model's coordinates: "pixel" (pixels of the image as the model saw it, after
    resizing), "normalized" (0 to 1) or "0-1000". `gold_space` is the space of the gold box: one of these, or
    "original", the pixels of the image as the dataset holds it. Both are converted with the sizes of the row's image
    (of several, `image_index`, counted from 0); without an image "original" and "pixel" are the same. `layout` and
    `gold_layout` are "xyxy" (corners), "xywh" (corner, width, height: COCO) or "yxyx".

    Boxes are read from the final part (the last `<answer>` block, else what follows `</think>`, else
    everything), as [x0, y0, x1, y1], (x0, y0), (x1, y1) and the like; of several the last counts. A
    predicted box is not clipped: the part outside the image lowers its score. With `threshold` the
    score is 1.0 if the overlap reaches it, else 0.0.

    Returns a score in [0, 1], 0.0 when no box parses or its corners are swapped; None when the row has
    no gold box. ValueError when the gold box has no area or does not lie in its image: most often
    gold_space is wrong. For RefCOCO, RefCOCO+, RefCOCOg, Visual Genome.

    >>> iou("[0, 0, 10, 10]", box=(0, 0, 10, 20))
    0.5
    >>> iou("<answer>(100, 0), (200, 500)</answer>", box=[0.1, 0, 0.2, 0.25], space="0-1000", gold_space="normalized")
    0.5
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}; it is an overlap in (0, 1]")
    if box is None:
        return None
    options = box_options(images, sample, **spaces)
    gold, predictions = options.gold(box), boxes_in(completion, options.layout)
    if not predictions:
        return 0.0
    score = iou_of(predictions[-1], gold)
    return score if threshold is None else float(score >= threshold - 1e-9)


@reward("giou", needs=("box",))
@takes_box_options
def giou(
    completion: str, box: Any, images: Sequence[Image] = (), sample: Sample | None = None, **spaces: Any
) -> float | None:
    """Generalised IoU of the completion's last box and the gold box (Rezatofighi et al., 2019).

    IoU - (hull - union) / hull; hull is the area of the smallest box around both. Two boxes apart score below 0,
    a near miss more than a far one. Options, spaces and the reading of boxes are the same as in the reward `iou`.

    Returns a score in (-1, 1], and -1.0 when no box parses or its corners are swapped; None when the row
    has no gold box. ValueError as `iou`. For RefCOCO and other grounding data while IoU is mostly 0.

    >>> giou("[0, 0, 10, 10]", box=(0, 0, 10, 20)), giou("[0, 0, 1, 1]", box=(1, 1, 2, 2))
    (0.5, -0.5)
    >>> giou("nowhere", box=(0, 0, 10, 20))
    -1.0
    """
    if box is None:
        return None
    options = box_options(images, sample, **spaces)
    gold, predictions = options.gold(box), boxes_in(completion, options.layout)
    return giou_of(predictions[-1], gold) if predictions else -1.0


def giou_of(box: Box, target: Box) -> float:
    """Return the generalised IoU of two boxes; -1 when one has no area."""
    if not (has_area(box) and has_area(target)):
        return -1.0
    shared, union, hull = overlap(box, target)
    if union <= 0 or hull <= 0:  # too small for a float
        return -1.0
    outside = max(0.0, hull - union) / hull  # rounding can leave the hull a hair below the union
    return max(-1.0, min(1.0, shared / union - outside))


@reward("box_match", needs=("boxes",))
@takes_box_options
def box_match(
    completion: str,
    boxes: Sequence[Any] | None,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    threshold: float = 0.5,
    **spaces: Any,
) -> float | None:
    """F1 of the completion's boxes and the gold boxes, each matched at most once.

    A match is a pair with IoU >= `threshold`; as many pairs as possible are matched. The score is twice their number,
    divided by the number of boxes on both sides. Options, spaces and the reading of boxes are the same as in the
    reward `iou`. Classes are not compared.

    Returns a score in [0, 1]. An empty list of gold boxes says that there is nothing to find: 1.0 without
    a box, else 0.0. More than 100 boxes score 0.0, unless gold has as many. None when the row has no gold
    list. ValueError as `iou`, or when the threshold is not in (0, 1]. For COCO, LVIS, PixMo, Visual Genome.

    >>> box_match("[0, 0, 10, 10] [50, 50, 60, 60]", boxes=[[0, 0, 10, 10]])
    0.6666666666666666
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}; it is an overlap in (0, 1]")
    if boxes is None:
        return None
    options = box_options(images, sample, **spaces)
    gold, predictions = [options.gold(box) for box in gold_boxes(boxes)], boxes_in(completion, options.layout)
    if not gold or not predictions:
        return float(len(gold) == len(predictions))
    if len(predictions) > max(MAX_BOXES, len(gold)):
        return 0.0
    hits = [[iou_of(box, target) >= threshold - 1e-9 for target in gold] for box in predictions]
    return 2 * max_pairs(hits) / (len(predictions) + len(gold))


def max_pairs(hits: Sequence[Sequence[bool]]) -> int:
    """Return the largest number of true entries that share no row and no column (augmenting paths, O(rows²·columns)).

    >>> max_pairs([[True, True], [True, False]])
    2
    """
    row_of: dict[int, int] = {}

    def assign(row: int, tried_columns: set[int]) -> bool:
        for column, hit in enumerate(hits[row]):
            if hit and column not in tried_columns:
                tried_columns.add(column)
                if column not in row_of or assign(row_of[column], tried_columns):
                    row_of[column] = row
                    return True
        return False

    return sum(assign(row, set()) for row in range(len(hits)))
