"""A processor under which a tiny random model calls tools: many tokens end a turn, and most turns decode to a call.

Its file is named in `model.processor`, as `path/to/calling.py:Calling`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from PIL import Image

from mm_grpo.processors.qwen_vl import QwenVLProcessor
from mm_grpo.types import Video

STOPS = range(40, 100)
"""Tokens that end a turn besides the model's own; about one in five of those that are sampled."""


class Calling(QwenVLProcessor):
    """Qwen's processor; what a turn says depends on its tokens alone."""

    def __init__(self, path: str, config: Any, **options: Any) -> None:
        super().__init__(path, config, **options)
        self.stop_token_ids |= frozenset(STOPS) - self.media_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        chosen = sum(token_ids)
        if chosen % 4 == 0:
            return f"answer {chosen}"
        call = {"name": "show", "arguments": {"number": chosen % 97, "images": chosen % 3}}
        return f"let me look <tool_call>{json.dumps(call)}</tool_call>"


class Gallery:
    """An environment that shows pictures, videos and texts of many sizes, and pays for what was seen: at the end, and
    for turns that show no picture a little each."""

    step_reward: float | None = None

    def reset(self, **row: Any) -> None:
        self.seen = 0

    def show(self, number: int, images: int) -> Any:
        """Show pictures.

        Args:
            number: Which.
            images: How many.
        """
        self.step_reward = None if images else 0.25
        rng = random.Random(number)
        parts: list[Any] = [f"number {number}: {'ab ' * rng.randrange(4)}"]
        for _ in range(images):
            self.seen += 1
            size = rng.choice([(56, 56), (84, 56), (40, 100)])
            frames = [Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3))) for _ in range(3)]
            clip = Video(tuple(frames), (number / 2, number / 2 + 1, number / 2 + 2), 1.0)
            parts.append(clip if number % 3 == 0 else frames[0])
        return [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]

    def get_reward(self) -> float:
        return float(self.seen)
