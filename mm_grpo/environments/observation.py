"""Observations: a tool's answer in the one form that a conversation takes, texts and images in order.

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

from mm_grpo.data.images import open_images
from mm_grpo.errors import DataError

Part = str | Image.Image
Fault = Literal[
    "unknown_tool", "bad_arguments", "raised", "bad_result", "too_many_images", "malformed_call", "timed_out", "died"
]  # fmt: skip
LONGEST_FAULT = 500
"""Characters of an exception's message that the model is told."""
ALL_BYTES = 2**31
"""Bytes that the images of one answer have as RGB at most, unless a single legal one has more."""
LONGEST_TEXT = 2**24
"""Characters of text that one answer may have; in UTF-8 they are 64 MiB at most."""


@dataclass(frozen=True)
class Limits:
    """Limits of an image in an answer: pixels once it is open, bytes while it is encoded."""

    max_pixels: int
    max_bytes: int

    @property
    def all_bytes(self) -> int:
        """Most bytes of all images of an answer, as RGB."""
        return max(ALL_BYTES, 3 * self.max_pixels)


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
    return Observation((f"error: {_encodable(why)[:LONGEST_FAULT]}",), fault)


def described(error: BaseException) -> str:
    """The type and message of an exception."""
    return f"{type(error).__name__}: {_encodable(str(error)[:2000])}"


def observation_of(result: Any, limits: Limits) -> Observation:
    """Convert a tool's answer; a fault where it cannot be shown, or an image cannot be opened within limits."""
    try:
        given = _parts(result)
        sources = [part.source for part in given if isinstance(part, _Image)]
        options = {"max_bytes": limits.max_bytes, "max_pixels": limits.max_pixels}
        images = iter(open_images(sources, row="the tool's answer", **options))
        parts = tuple(next(images) if isinstance(part, _Image) else part for part in given)
    except DataError as error:
        return failed("bad_result", str(error))
    except Exception as error:  # out of the user's object: __str__, __iter__, get
        return failed("bad_result", f"the answer cannot be shown ({described(error)})")
    return checked(Observation(parts), limits)


def checked(seen: Observation, limits: Limits) -> Observation:
    """The observation, or the fault that it is too large."""
    text = sum(len(part) for part in seen.parts if isinstance(part, str))
    if text > LONGEST_TEXT:
        return failed("bad_result", f"the answer has {text} characters; at most {LONGEST_TEXT} are shown")
    pixels = sum(3 * image.width * image.height for image in seen.images)
    if pixels > limits.all_bytes:
        why = f"the answer's images have {pixels} bytes; at most {limits.all_bytes} are shown"
        return failed("bad_result", why)
    return seen


@dataclass(frozen=True)
class _Image:
    """An answer's image, not opened yet."""

    source: Any


def _parts(result: Any) -> list[str | _Image]:
    if result is None:
        return []
    if isinstance(result, str):
        return [_encodable(result)]
    if isinstance(result, Image.Image):
        return [_Image(result)]
    if isinstance(result, list | tuple) and any(_is_part(item) for item in result):
        return [part for item in result for part in _parts(item)]
    if isinstance(result, Mapping) and result.get("type") == "text":
        return [_encodable(str(result.get("text")))]
    if isinstance(result, Mapping) and result.get("type") == "image":
        return [_Image(result.get("image"))]
    try:
        return [_encodable(json.dumps(result, ensure_ascii=False))]
    except (TypeError, ValueError, RecursionError):
        return [_encodable(str(result))]


def _is_part(item: Any) -> bool:
    if isinstance(item, Mapping):
        return item.get("type") in ("text", "image")
    return isinstance(item, Image.Image)


def _encodable(text: str) -> str:
    """A text as UTF-8 has it: half a character, which no tokenizer takes, becomes a question mark."""
    return str.encode(text, "utf-8", "replace").decode()
