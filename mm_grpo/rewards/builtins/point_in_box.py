"""The reward `point_in_box`: the completion points into the gold box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.rewards.builtins.boxes import (
    Frame,
    GoldSpace,
    Layout,
    Space,
    check_space,
    point_in,
)
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.types import Sample


@reward("point_in_box", needs=("box",))
def point_in_box(
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
    """Whether the completion's last point lies in the gold box, edges included.

    A point is read from the final part (the last `<answer>` block, else what follows `</think>`, else
    everything): (x, y), [x, y], x=1, y=2, <point x="1" y="2"> or two numbers alone; of a box (in `layout`)
    the centre counts. `space`, `gold_space`, `gold_layout` and `image_index` are those of the reward `iou`.

    Returns 1.0 or 0.0 (0.0 when no point parses); None when the row has no gold box. ValueError as `iou`.
    For clicks on screens and pointing: ScreenSpot, OS-Atlas, ShowUI.

    >>> point_in_box("pyautogui.click(x=15, y=10)", box=[10, 10, 20, 20])
    1.0
    >>> point_in_box("(0.5, 0.95)", box=[400, 400, 600, 600], space="normalized", gold_space="0-1000")
    0.0
    """
    check_space(space, gold_space)
    if box is None:
        return None
    frame = Frame.of(images, sample, image_index)
    gold = frame.gold(box, gold_layout, gold_space)
    point = point_in(completion, layout)
    if point is None:
        return 0.0
    x0, y0, x1, y1 = frame.moved(gold, gold_space, space)
    return float(x0 <= point[0] <= x1 and y0 <= point[1] <= y1)
