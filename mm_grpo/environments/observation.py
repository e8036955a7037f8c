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

from mm_grpo.data.images import open_images
from mm_grpo.data.row_settings import read_video
from mm_grpo.data.videos import VideoSource, open_video
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
    for part in parts:
        state.update(repr(part_fields(part)).encode())
        for frame in frames_of(part):
            state.update(frame.tobytes())
    return state.digest()


def part_fields(part: Part) -> Any:
    """Return a part without its pixels, as JSON."""
    if isinstance(part, str):
        return part
    times, fps = (part.times, part.fps) if isinstance(part, Video) else (None, None)
    return {"size": part.size, "times": times, "fps": fps}


def frames_of(part: Part) -> tuple[Image.Image, ...]:
    """Return the pictures of a part: the frames of a video, an image itself, of a text none."""
    if isinstance(part, Video):
        return part.frames
    return () if isinstance(part, str) else (part,)


def observation_of(result: Any, *, fps: float, max_frames: int) -> Observation:
    """Convert a tool's answer. Return a fault if it cannot be shown, or a medium exceeds the limits of a row's.

    Of a video's file `fps` frames per second are shown, and of any video `max_frames` at most.
    """
    try:
        unopened = _parts(result)
        sources = [part.source for part in unopened if isinstance(part, _Image)]
        images = iter(open_images(sources, row=ROW))
        parts = tuple(
            next(images) if isinstance(part, _Image) else _opened(part, fps, max_frames) for part in unopened
        )
    except DataError as error:
        return failed("bad_result", str(error))
    except Exception as error:  # out of the user's object: __str__, __iter__, get
        return failed("bad_result", f"the answer cannot be shown ({describe_error(error)})")
    return Observation(parts)


@dataclass(frozen=True)
class _Image:
    """Image of an answer, not opened yet."""

    source: Any


def _opened(part: str | VideoSource | Video, fps: float, max_frames: int) -> Part:
    """Open a video, whose frames become upright and RGB. Raise DataError if its fields do not fit together."""
    if isinstance(part, str):
        return part
    if isinstance(part, VideoSource):
        return open_video(part, row=ROW, fps=fps, max_frames=max_frames)
    count, times = len(part.frames), tuple(map(float, part.times))
    sizes = {frame.size for frame in part.frames}
    if not (0 < count == len(times) <= max_frames and len(sizes) == 1 and part.fps > 0):
        raise DataError(
            f"{ROW}: a video of {count} frames of {len(sizes)} size(s), {len(times)} times and fps {part.fps}; legal "
            f"are 1 to {max_frames} frames (data.video_max_frames) of one size, as many times, and fps above 0"
        )
    return Video(open_images(part.frames, row=f"{ROW}: video"), times, float(part.fps))


def _parts(result: Any) -> list[str | _Image | VideoSource | Video]:
    if result is None:
        return []
    if isinstance(result, str):
        return [_encodable(result)]
    if isinstance(result, Image.Image):
        return [_Image(result)]
    if isinstance(result, Video):
        return [result]
    if isinstance(result, list | tuple) and any(_is_part(item) for item in result):
        return [part for item in result for part in _parts(item)]
    if isinstance(result, Mapping) and result.get("type") == "text":
        return [_encodable(str(result.get("text")))]
    if isinstance(result, Mapping) and result.get("type") == "image":
        return [_Image(result.get("image"))]
    if isinstance(result, Mapping) and result.get("type") == "video":
        video = result.get("video")
        return [video if isinstance(video, Video) and len(result) == 2 else read_video(video, result, ROW)]
    try:
        return [_encodable(json.dumps(result, ensure_ascii=False))]
    except (TypeError, ValueError, RecursionError):
        return [_encodable(str(result))]


def _is_part(item: Any) -> bool:
    if isinstance(item, Mapping):
        return item.get("type") in ("text", "image", "video")
    return isinstance(item, Image.Image | Video)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes, by question marks."""
    return str.encode(text, "utf-8", "replace").decode()
