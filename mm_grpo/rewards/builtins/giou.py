"""The reward `giou`: generalised overlap, which also says how far a miss is off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.rewards.builtins.boxes import (
    Box,
    Frame,
    GoldSpace,
    Layout,
    Space,
    boxes_in,
    check_space,
    has_area,
    overlap,
)
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.types import Sample


@reward("giou", needs=("box",))
def giou(
    completion: str,
    box: Any,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    space: Space = "pixel",
    gold_space: GoldSpace = "original",
    layout: Layout = "xyxy",
    gold_layout: Layout = "xyxy",
    image_index: int = 0,
) -> float | None:
    """Generalised IoU of the completion's last box and the gold box (Rezatofighi et al., 2019).

    IoU - (hull - union) / hull, where hull is the smallest box around both: two boxes apart score
    below 0, and the less the farther, so that a near miss is told from a far one. Options, spaces, and how
    boxes are read, are those of the reward `iou`.

    Returns a score in (-1, 1], and -1.0 when no box parses or its corners are swapped; None when the row
    has no gold box. ValueError as `iou`. For RefCOCO and other grounding data while IoU is mostly 0.

    >>> giou("[0, 0, 10, 10]", box=(0, 0, 10, 20)), giou("[0, 0, 1, 1]", box=(1, 1, 2, 2))
    (0.5, -0.5)
    >>> giou("nowhere", box=(0, 0, 10, 20))
    -1.0
    """
    check_space(space, gold_space)
    if box is None:
        return None
    frame = Frame.of(images, sample, image_index)
    gold = frame.gold(box, gold_layout, gold_space)
    found = boxes_in(completion, layout)
    return giou_of(found[-1], frame.moved(gold, gold_space, space)) if found else -1.0


def giou_of(one: Box, other: Box) -> float:
    """Generalised IoU of two boxes; -1 when one has no area."""
    if not (has_area(one) and has_area(other)):
        return -1.0
    shared, union, hull = overlap(one, other)
    if union <= 0 or hull <= 0:  # too small for a float
        return -1.0
    outside = max(0.0, hull - union) / hull  # rounding can leave the hull a hair below the union
    return max(-1.0, min(1.0, shared / union - outside))
