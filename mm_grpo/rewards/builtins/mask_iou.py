"""The reward `mask_iou`: overlap of the predicted and the gold mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.rewards.builtins.boxes import Frame, GoldSpace, Space, check_space
from mm_grpo.rewards.builtins.masks import Rle, Shape, mask_in, read_mask, render
from mm_grpo.rewards.registry import reward

if TYPE_CHECKING:
    from numpy import bool_
    from numpy.typing import NDArray
    from PIL.Image import Image

    from mm_grpo.types import Sample


@reward("mask_iou", needs=("mask",))
def mask_iou(
    completion: str,
    mask: Any,
    images: Sequence[Image] = (),
    sample: Sample | None = None,
    *,
    space: Space = "pixel",
    gold_space: GoldSpace = "original",
    resolution: int = 512,
    image_index: int = 0,
) -> float | None:
    """Intersection over union of two masks, each an RLE or polygons.

    An RLE is COCO's {"size": [height, width], "counts": ...}, compressed or not; it covers the whole image,
    whatever its size (a row without an image has the size of its gold RLE). Polygons are [x0, y0, x1, y1,
    ...], [[x0, y0], [x1, y1], ...], or a list of several, whose union counts; four numbers are a box
    (x0, y0, x1, y1). Gold may be either, as a value or as JSON text; the completion writes JSON in its
    final part (the last `<answer>` block, else what follows `</think>`, else everything), the last such
    value counts, and it may stand in a mapping under "mask", "segmentation" or "polygon". `space`,
    `gold_space` and `image_index` are those of the reward `iou`.

    Both are drawn on one grid, where a cell belongs to a shape that holds its centre: that of the gold
    RLE, else the image's proportions with `resolution` cells on its longer side. So the score of polygons
    is exact to about the circumference in cells divided by the area. What lies outside the image is cut off.

    Returns a score in [0, 1], 0.0 when no mask parses, for a predicted RLE of more than 16 million cells,
    or for more than 2,000 points; None when the row has no gold mask. ValueError when the gold mask cannot
    be read or is empty. For RefCOCO's segmentations, ReasonSeg, LVIS. Needs numpy, which comes with torch.

    >>> mask_iou("[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]", mask=[0, 0, 1, 0, 1, 1, 0, 1],
    ...          space="normalized", gold_space="normalized")
    0.5
    >>> mask_iou("[0, 0, 1, 1]", mask={"size": [2, 2], "counts": [0, 2, 2]}, space="normalized")
    0.5
    """
    check_space(space, gold_space)
    if resolution < 1:
        raise ValueError(f"resolution={resolution}; it is a number of cells and must be at least 1")
    if mask is None:
        return None
    frame, gold = Frame.of(images, sample, image_index), read_mask(mask)
    if gold is None:
        raise ValueError(
            f"the gold mask is {str(mask)[:80]}; it must be an RLE with size and counts, or polygons"
        )
    if isinstance(gold, Rle) and frame.original is None:
        frame = Frame((gold.width, gold.height), (gold.width, gold.height))
    given = mask_in(completion)
    grid = _grid(gold, frame, resolution)
    right = _draw(gold, frame, gold_space, grid)
    if not right.any():
        raise ValueError("the gold mask is empty on its grid; see the options gold_space and resolution")
    if given is None:
        return 0.0
    ours = _draw(given, frame, space, grid)
    return float((right & ours).sum() / (right | ours).sum())


def _draw(shape: Shape, frame: Frame, space: str, grid: tuple[int, int]) -> NDArray[bool_]:
    return render(shape, (1.0, 1.0) if isinstance(shape, Rle) else frame.extent(space), grid)


def _grid(gold: Shape, frame: Frame, resolution: int) -> tuple[int, int]:
    """Height and width in cells."""
    if isinstance(gold, Rle):
        return gold.height, gold.width
    width, height = frame.original or (1, 1)
    longer = max(width, height)
    return max(1, round(resolution * height / longer)), max(1, round(resolution * width / longer))
