"""What a tool answered, in the one form that a conversation takes: texts and images in order.

A tool may return text, a PIL image, None, a list of these or of the chat format's parts ({"type": "text", "text": ...},
{"type": "image", "image": ...}), or any other value, of which the model sees the JSON. What cannot be shown is a fault,
which the model is told in place of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from mm_grpo.data.images import open_image
from mm_grpo.errors import DataError

Part = str | Image.Image
Fault = Literal["unknown_tool", "bad_arguments", "raised", "bad_result", "too_many_images", "malformed_call"]
LONGEST_FAULT = 500
"""Characters of an exception's message that the model is told."""


@dataclass(frozen=True)
class Observation:
    """Texts and images that a tool answered with; `fault` says what kind of failure the text describes."""

    parts: tuple[Part, ...]
    fault: Fault | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))


def failed(fault: Fault, why: str) -> Observation:
    """The observation that tells the model what went wrong."""
    return Observation((f"error: {why[:LONGEST_FAULT]}",), fault)


def observation_of(result: Any, *, max_pixels: int, max_bytes: int) -> Observation:
    """What a tool returned; a fault where it holds an image that cannot be opened within the limits."""
    try:
        return Observation(tuple(_parts(result, max_pixels, max_bytes)))
    except DataError as error:
        return failed("bad_result", str(error))


def _parts(result: Any, max_pixels: int, max_bytes: int) -> list[Part]:
    if result is None:
        return []
    if isinstance(result, str):
        return [result]
    if isinstance(result, Image.Image):
        return [_opened(result, max_pixels, max_bytes)]
    if isinstance(result, list | tuple) and any(_is_part(item) for item in result):
        return [part for item in result for part in _parts(item, max_pixels, max_bytes)]
    if isinstance(result, Mapping) and result.get("type") == "text":
        return [str(result.get("text"))]
    if isinstance(result, Mapping) and result.get("type") == "image":
        return [_opened(result.get("image"), max_pixels, max_bytes)]
    try:
        return [json.dumps(result, ensure_ascii=False)]
    except (TypeError, ValueError, RecursionError):
        return [str(result)]


def _is_part(item: Any) -> bool:
    if isinstance(item, Mapping):
        return item.get("type") in ("text", "image")
    return isinstance(item, Image.Image)


def _opened(source: Any, max_pixels: int, max_bytes: int) -> Image.Image:
    return open_image(source, row="the tool's answer", max_bytes=max_bytes, max_pixels=max_pixels)
