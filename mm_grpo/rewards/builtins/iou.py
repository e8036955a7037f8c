"""The reward `iou`: overlap of the predicted and the gold box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.rewards.builtins.boxes import (
    Frame,
    GoldSpace,
    Layout,
    Space,
    boxes_in,
    check_space,
    iou_of,
)
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.types import Sample


@reward("iou", needs=("box",))
def iou(
    completion: str,
    box: Any,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    threshold: float | None = None,
    space: Space = "pixel",
    gold_space: GoldSpace = "original",
    layout: Layout = "xyxy",
    gold_layout: Layout = "xyxy",
    image_index: int = 0,
) -> float | None:
    """Intersection over union of the completion's last box and the gold box.

    `space` is where the model's coordinates live: "pixel" (pixels of the image as the model saw it,
    after resizing), "normalized" (0 to 1) or "0-1000". `gold_space` is where the gold box lives: one of
    these, or "original", the pixels of the image as the dataset holds it. Both are converted with the
    row's own image sizes (`image_index` is its number when there are several, from 0); without an image, pixels are
    pixels. `layout` and `gold_layout` are "xyxy" (corners), "xywh" (corner, width, height: COCO) or "yxyx".

    Boxes are read from the final part (the last `<answer>` block, else what follows `</think>`, else
    everything), as [x0, y0, x1, y1], (x0, y0), (x1, y1) and the like; of several the last counts. A
    predicted box is not clipped: what sticks out of the image counts against it. With `threshold` the
    score is 1.0 where the overlap reaches it, else 0.0.

    Returns a score in [0, 1], 0.0 when no box parses or its corners are swapped; None when the row has
    no gold box. ValueError when the gold box has no area or does not lie in its image, which most often
    means another gold_space. For RefCOCO, RefCOCO+, RefCOCOg, Visual Genome.

    >>> iou("[0, 0, 10, 10]", box=(0, 0, 10, 20))
    0.5
    >>> iou("<answer>(100, 0), (200, 500)</answer>", box=[0.1, 0, 0.2, 0.25], space="0-1000", gold_space="normalized")
    0.5
    """
    check_space(space, gold_space)
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}; it is an overlap in (0, 1]")
    if box is None:
        return None
    frame = Frame.of(images, sample, image_index)
    gold = frame.gold(box, gold_layout, gold_space)
    found = boxes_in(completion, layout)
    if not found:
        return 0.0
    score = iou_of(found[-1], frame.moved(gold, gold_space, space))
    return score if threshold is None else float(score >= threshold - 1e-9)
