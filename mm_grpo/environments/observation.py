"""Observations: a tool's answer as texts, images and videos in order.

A tool may return text, a PIL image, a `Video`, None, a list of these or of the chat format's parts ({"type": "text",
"text": ...}, {"type": "image", "image": ...}, {"type": "video", "video": ...} with the keys of a row's video), or any
other value, which the model sees as JSON. If it cannot be shown, the model sees a fault instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from PIL import Image

from mm_grpo.data.images import open_image, open_images
from mm_grpo.data.row_settings import read_video
from mm_grpo.data.videos import open_video
from mm_grpo.errors import DataError
from mm_grpo.types import Video

Part = str | Image.Image | Video
FaultKind = Literal[
    "unknown_tool", "bad_arguments", "raised", "bad_result", "too_many_images", "malformed_call", "timed_out", "died"
]  # fmt: skip
LONGEST_FAULT = 500
"""Characters of an exception's message that the model sees."""
ROW = "the tool's answer"


@dataclass(frozen=True)
class Observation:
    """Texts and media of a tool's answer; with a `fault` the text describes a failure of that kind."""

    parts: tuple[Part, ...]
    fault: FaultKind | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[Image.Image | Video, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))


def failed(fault: FaultKind, why: str) -> Observation:
    """Return an observation that shows the model what went wrong."""
    return Observation((f"error: {_encodable(why)[:LONGEST_FAULT]}",), fault)


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception."""
    return f"{type(error).__name__}: {_encodable(str(error)[:2000])}"


def digest(parts: Iterable[Part]) -> bytes:
    """Return a digest of texts, pixels and the times of frames."""
    state = sha256()
    for fields, frames in map(split_part, parts):
        state.update(repr(fields).encode())
        for frame in frames:
            state.update(frame.tobytes())
    return state.digest()


def split_part(part: Part) -> tuple[Any, tuple[Image.Image, ...]]:
    """Return a part without pixels, as JSON, and its pictures: of a video the frames, of a text none."""
    if isinstance(part, str):
        return part, ()
    if isinstance(part, Video):
        return {"size": part.size, "times": part.times, "fps": part.fps}, part.frames
    return {"size": part.size, "times": None}, (part,)


def observation_of(result: Any, **limits: Any) -> Observation:
    """Convert a tool's answer. Return a fault if it cannot be shown, or a medium exceeds the limits of a row's.

    `limits` are `fps` and `max_frames` of `open_video`.
    """
    try:
        return Observation(tuple(_parts(result, **limits)))
    except DataError as error:
        return failed("bad_result", str(error))
    except Exception as error:  # out of the user's object: __str__, __iter__, get
        return failed("bad_result", f"the answer cannot be shown ({describe_error(error)})")


def _parts(result: Any, **limits: Any) -> list[Part]:
    if result is None:
        return []
    if isinstance(result, str):
        return [_encodable(result)]
    if isinstance(result, Image.Image):
        return [open_image(result, row=ROW)]
    if isinstance(result, Video):
        return [_checked(result, limits["max_frames"])]
    if isinstance(result, list | tuple) and any(_is_part(item) for item in result):
        return [part for item in result for part in _parts(item, **limits)]
    if isinstance(result, Mapping) and result.get("type") == "text":
        return [_encodable(str(result.get("text")))]
    if isinstance(result, Mapping) and result.get("type") == "image":
        return [open_image(result.get("image"), row=ROW)]
    if isinstance(result, Mapping) and result.get("type") == "video":
        if isinstance(result.get("video"), Video) and len(result) == 2:
            return _parts(result["video"], **limits)
        return [open_video(read_video(result.get("video"), result, ROW), row=ROW, **limits)]
    try:
        return [_encodable(json.dumps(result, ensure_ascii=False))]
    except (TypeError, ValueError, RecursionError):
        return [_encodable(str(result))]


def _checked(video: Video, max_frames: int) -> Video:
    """Return a video whose frames are upright and RGB. Raise DataError if its fields do not fit together."""
    times, sizes = tuple(map(float, video.times)), {frame.size for frame in video.frames}
    if not (0 < len(video.frames) == len(times) <= max_frames and len(sizes) == 1 and video.fps > 0):
        raise DataError(
            f"{ROW}: a video of {len(video.frames)} frames of {len(sizes)} size(s), {len(times)} times and fps "
            f"{video.fps}; legal are up to {max_frames} frames (data.video_max_frames), all of one size, as many "
            "times, and fps above 0"
        )
    return Video(open_images(video.frames, row=f"{ROW}: video"), times, float(video.fps))


def _is_part(item: Any) -> bool:
    if isinstance(item, Mapping):
        return item.get("type") in ("text", "image", "video")
    return isinstance(item, Image.Image | Video)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes, by question marks."""
    return str.encode(text, "utf-8", "replace").decode()
