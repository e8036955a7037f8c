"""The reward `box_match`: several boxes against several, matched one to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from mm_grpo.rewards.builtins.assignment import assign
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

MOST_BOXES = 100


@reward("box_match", needs=("boxes",))
def box_match(
    completion: str,
    boxes: Sequence[Any] | None,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    metric: Literal["f1", "mean_iou"] = "f1",
    threshold: float = 0.5,
    space: Space = "pixel",
    gold_space: GoldSpace = "original",
    layout: Layout = "xyxy",
    gold_layout: Layout = "xyxy",
    image_index: int = 0,
) -> float | None:
    """How well the completion's boxes match the gold boxes, each at most once.

    Metric "f1": the largest number of pairs with IoU >= `threshold` that shares no box, doubled and
    divided by the number of boxes on both sides. Metric "mean_iou": the matching with the most IoU in
    all, its sum divided by the larger number of boxes; missed and surplus boxes count 0. The matching is
    exact (Hungarian method). Options, spaces, and how boxes are read, are those of the reward `iou`;
    classes are not compared.

    Returns a score in [0, 1]. An empty list of gold boxes says that there is nothing to find: 1.0 without
    a box, else 0.0. More than 100 boxes score 0.0, unless gold has as many. None when the row has no gold
    list. ValueError as `iou`, or when metric or threshold mean nothing. For COCO, LVIS, PixMo, Visual Genome.

    >>> box_match("[0, 0, 10, 10] [50, 50, 60, 60]", boxes=[[0, 0, 10, 10]])
    0.6666666666666666
    >>> box_match("[0, 0, 10, 10]", boxes=[[0, 0, 10, 20], [5, 5, 9, 9]], metric="mean_iou")
    0.25
    """
    check_space(space, gold_space)
    if metric not in ("f1", "mean_iou"):
        raise ValueError(f"metric={metric!r}; legal are 'f1' and 'mean_iou'")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}; it is an overlap in (0, 1]")
    if boxes is None:
        return None
    frame = Frame.of(images, sample, image_index)
    gold = [frame.gold(box, gold_layout, gold_space) for box in boxes]
    found = boxes_in(completion, layout)
    if not gold or not found:
        return float(len(gold) == len(found))
    if len(found) > max(MOST_BOXES, len(gold)):
        return 0.0
    wanted = [frame.moved(box, gold_space, space) for box in gold]
    overlaps = [[iou_of(one, other) for other in wanted] for one in found]
    if metric == "mean_iou":
        return sum(overlaps[i][j] for i, j in assign(overlaps)) / max(len(found), len(gold))
    hits = [[float(value >= threshold - 1e-9) for value in row] for row in overlaps]
    return 2 * sum(hits[i][j] for i, j in assign(hits)) / (len(found) + len(gold))
