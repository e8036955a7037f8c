"""The one resize of an image: to a size that the rule of its family maps to itself.

Every family has a rule from the size of an image to the size that its model sees. Engines apply it too, and cannot be
asked not to. So an image is resized here, once, to a size that the rule does not change; the family's own image
processor then changes nothing, in the learner or in an engine. A rule may change its own result again, so it is applied
until it settles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mm_grpo.errors import BadMedia

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_WALK = 16
"""Applications of a rule after which an image counts as having no stable size."""
Size = tuple[int, int]
"""(height, width) in pixels."""


class NoFixedPoint(BadMedia):
    """The resize rule refuses this image under these limits, or never settles."""


def settle(size: Size, rule: Callable[[Size], Size]) -> Size:
    """Apply `rule` until it maps a size to itself, and return that. NoFixedPoint if it does not settle."""
    current = size
    for _ in range(MAX_WALK):
        following = rule(current)
        if following == current and all(current):
            return current
        current = following
    raise NoFixedPoint(f"{size[1]}x{size[0]} pixels: the model's own processor would resize any result again")


def resize_to(image: Image, size: Size) -> Image:
    """Resize the image by bicubic resampling; return the same object if it has the size already."""
    from PIL.Image import Resampling

    height, width = size
    if (image.height, image.width) == size:
        return image
    return image.resize((width, height), Resampling.BICUBIC)
