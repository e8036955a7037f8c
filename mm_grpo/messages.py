"""Parts of chat messages, and limits that stand in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MEDIA_TYPES = ("image", "video")
"""Types of the parts that are not text."""
PIXEL_LIMITS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of an image part that limit the size of its image, in pixels; the last two come together."""


def content_parts(content: Any) -> Sequence[Mapping[str, Any]]:
    """Return the parts of a message's content; a string is one text part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or ()


def messages_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the texts of messages without their other parts, a line for each message."""
    contents = (content_parts(message.get("content")) for message in messages)
    return "\n".join("".join(part.get("text") or "" for part in parts) for parts in contents)


def media_parts(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the image and video parts of messages, in order."""
    parts = (part for message in messages for part in content_parts(message["content"]))
    return [part for part in parts if part["type"] in MEDIA_TYPES]


def pixel_limits(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return the limits of each image and video part, in order: the keys PIXEL_LIMITS that it holds."""
    return [{k: part[k] for k in PIXEL_LIMITS if k in part} for part in media_parts(messages)]


def with_limits(
    messages: Sequence[Mapping[str, Any]], limits: Mapping[str, int] | None
) -> list[dict[str, Any]]:
    """Return messages with `limits` in each image part, whose own are clipped to them; None removes those of all parts.

    Limits of a source or a row are of images; a video's parts keep their own.
    """

    def change(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] != "image" or limits is None:
            return {key: value for key, value in part.items() if key not in PIXEL_LIMITS}
        low, high = limits.get("min_pixels", 1), limits.get("max_pixels", math.inf)
        clipped = {key: min(max(part[key], low), high) for key in PIXEL_LIMITS[:2] if key in part}
        return {"type": "image", **limits, **part, **clipped}

    contents = [
        m["content"] if isinstance(m["content"], str) else [*map(change, m["content"])] for m in messages
    ]
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
