"""Observations: a tool's answer as texts and images in order.

A tool may return text, a PIL image, None, a list of these or of the chat format's parts ({"type": "text", "text": ...},
{"type": "image", "image": ...}), or any other value, which the model sees as JSON. If it cannot be shown, the model
sees a fault instead.
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
FaultKind = Literal[
    "unknown_tool", "bad_arguments", "raised", "bad_result", "too_many_images", "malformed_call", "timed_out", "died"
]  # fmt: skip
LONGEST_FAULT = 500
"""Characters of an exception's message that the model sees."""


@dataclass(frozen=True)
class Observation:
    """Texts and images of a tool's answer; with a `fault` the text describes a failure of that kind."""

    parts: tuple[Part, ...]
    fault: FaultKind | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))


def failed(fault: FaultKind, why: str) -> Observation:
    """Return an observation that shows the model what went wrong."""
    return Observation((f"error: {_encodable(why)[:LONGEST_FAULT]}",), fault)


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception."""
    return f"{type(error).__name__}: {_encodable(str(error)[:2000])}"


def observation_of(result: Any) -> Observation:
    """Convert a tool's answer. Return a fault if it cannot be shown, or an image exceeds the limits of a row's."""
    try:
        unopened = _parts(result)
        sources = [part.source for part in unopened if isinstance(part, _Image)]
        images = iter(open_images(sources, row="the tool's answer"))
        parts = tuple(next(images) if isinstance(part, _Image) else part for part in unopened)
    except DataError as error:
        return failed("bad_result", str(error))
    except Exception as error:  # out of the user's object: __str__, __iter__, get
        return failed("bad_result", f"the answer cannot be shown ({describe_error(error)})")
    return Observation(parts)


@dataclass(frozen=True)
class _Image:
    """Image of an answer, not opened yet."""

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
    """Replace lone surrogates, which no tokenizer takes, by question marks."""
    return str.encode(text, "utf-8", "replace").decode()
