"""Tiny random models (names of mm_grpo/testing/tiny_models.py), and rows to feed them."""

from __future__ import annotations

import random
from typing import Any

from PIL import Image

from mm_grpo.types import Sample, Video

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Types of Qwen-VL with full attention in all text layers."""
HYBRID = "qwen3_5"
"""The family with layers of linear attention too."""


def __getattr__(name: str) -> Any:
    """ALL and build, which import torch: tests that only want pictures do not wait for them."""
    if name not in ("ALL", "build"):  # pytest asks modules for many names
        raise AttributeError(name)
    from mm_grpo.testing import tiny_models

    return tiny_models.build if name == "build" else tuple(tiny_models.RECIPES)


def picture(seed: int, width: int = 84, height: int = 84) -> Image.Image:
    """A picture of random coloured blocks, different for every seed."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
    for _ in range(4):
        x, y = rng.randrange(width), rng.randrange(height)
        image.paste(tuple(rng.randrange(256) for _ in range(3)), (x // 2, y // 2, x // 2 + 20, y // 2 + 24))
    return image


def video(seed: int, frames: int = 4, width: int = 84, height: int = 84, fps: float = 2.0) -> Video:
    """A video of random pictures, from second 1 on, all different."""
    pictures = tuple(picture(1000 * seed + frame, width, height) for frame in range(frames))
    return Video(pictures, tuple(1 + frame / fps for frame in range(frames)), fps)


def sample(
    uid: str,
    text: str = "what is it",
    images: tuple[Image.Image, ...] = (),
    videos: tuple[Video, ...] = (),
    **columns: Any,
) -> Sample:
    """A sample whose images, and then its videos, stand before its text."""
    parts = [{"type": "image"} for _ in images] + [{"type": "video"} for _ in videos]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return Sample(uid=uid, messages=messages, images=images, videos=videos, columns=columns)
