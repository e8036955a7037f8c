"""The one resize of an image: to a size that the rule of its family maps to itself.

Every family has a rule that turns the size of an image into the size that its model sees. Engines apply it too, and
cannot be asked not to. So an image is resized here, once, to a size that the rule leaves as it is; the family's own
image processor then changes nothing, in the learner or in an engine. Applied to its own result a rule mostly changes
nothing, but not always, so it is applied until it settles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_WALK = 16
"""Most times that a rule is applied before an image counts as having no stable size."""
Size = tuple[int, int]
"""(height, width) in pixels."""


class NoFixedPoint(ValueError):
    """The resize rule never settles for this image under these limits."""


def settle(size: Size, rule: Callable[[Size], Size]) -> Size:
    """The size that `rule` maps to itself, reached from `size`. NoFixedPoint where it does not settle."""
    found = size
    for _ in range(MAX_WALK):
        following = rule(found)
        if following == found and all(found):
            return found
        found = following
    raise NoFixedPoint(f"{size[1]}x{size[0]} pixels: the model's own processor would resize any result again")


def resize_to(image: Image, size: Size) -> Image:
    """The image at `size`, by bicubic resampling; the same object when it is there already."""
    from PIL.Image import Resampling

    height, width = size
    if (image.height, image.width) == size:
        return image
    return image.resize((width, height), Resampling.BICUBIC)
