"""Settings of one row: limits of its images' sizes, what is shown of its videos, and arguments of the chat template.

Limits and keys of videos stand in the parts of messages or in the entries of a column, as qwen-vl-utils reads them
(`messages.PIXEL_LIMITS`, VIDEO_KEYS). Each limit of an image is clipped to the limits of the row, which may stand in
its column `chat_template_kwargs`, and of its source; a processor clips them to the run's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mm_grpo.config.values import plain_mapping
from mm_grpo.data.columns import brief
from mm_grpo.data.media_columns import looks_like_frame
from mm_grpo.data.videos import VideoSource
from mm_grpo.errors import DataError
from mm_grpo.files import parse_json
from mm_grpo.messages import PIXEL_LIMITS
from mm_grpo.numbers import is_number

TEMPLATE_COLUMN = "chat_template_kwargs"
VIDEO_KEYS = {
    "fps": "fps", "sample_fps": "fps", "raw_fps": "", "start": "start", "video_start": "start", "end": "end",
    "video_end": "end", "max_frames": "max_frames", "nframes": "frames",
}  # fmt: skip
"""Keys of a video and the fields of `VideoSource` that they set; `raw_fps` is of the file that frames came from."""
_FRAME_KEYS = {"sample_fps", "raw_fps"}
"""Keys of a list of frames alone, which has `fps` too, and no other."""


def read_limits(values: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the limits of an image's size in a mapping, without null. DataError for one that is wrong."""
    limits = {key: values[key] for key in PIXEL_LIMITS if values.get(key) is not None}
    whole = all(is_number(value) and value >= 1 and value % 1 == 0 for value in limits.values())
    sides = len(limits.keys() & {"resized_height", "resized_width"})
    if not whole or sides == 1 or limits.get("min_pixels", 1) > limits.get("max_pixels", math.inf):
        raise DataError(
            f"{where}: {limits}: legal are whole numbers of pixels from 1, min_pixels up to max_pixels, and "
            "resized_height together with resized_width"
        )
    return {key: int(value) for key, value in limits.items()}


def read_video(source: Any, values: Mapping[str, Any], where: str) -> VideoSource:
    """Return a video with its settings in a mapping (VIDEO_KEYS), without null. DataError for one that is wrong."""
    is_list = isinstance(source, list | tuple)
    is_other = isinstance(source, Mapping) and not source.keys() <= {"bytes", "path"}
    is_hollow = is_list and (not source or any(frame is None for frame in source))
    if is_other or is_hollow or looks_like_frame(source):
        raise DataError(
            f"{where}: a video is {brief(source)}; legal is its file, or a list of its frames, none of them null: in "
            "'video', in a part of the prompt, or as an entry of 'videos'. An image belongs into 'image' or 'images'"
        )
    options = {key: values[key] for key in VIDEO_KEYS if values.get(key) is not None}
    settings = {VIDEO_KEYS[key]: value for key, value in options.items()}
    repeated = len(settings) < len(options) or {"frames", "fps"} <= settings.keys()
    settings.pop("", None)
    video = VideoSource(source, **settings)
    video.check(where)
    counts = {name: int(settings[name]) for name in ("max_frames", "frames") if name in settings}
    is_whole = all(settings[name] == count for name, count in counts.items())
    legal_keys = _FRAME_KEYS | {"fps"} if is_list else VIDEO_KEYS.keys() - _FRAME_KEYS
    if repeated or not is_whole or not video.span[0] < video.span[1] or not options.keys() <= legal_keys:
        raise DataError(
            f"{where}: {options}: legal are fps or nframes; start before end; whole numbers of frames; each once; of a "
            "list of frames fps (or sample_fps) alone"
        )
    return replace(video, **counts)


def read_template_kwargs(value: Any, row_name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments of the chat template in a row's column, and the limits of all its images there.

    The value is a mapping, JSON text of one, or None. DataError if it is none of these.
    """
    where = f"{row_name}: {TEMPLATE_COLUMN}"
    try:
        arguments = plain_mapping((parse_json(value) if isinstance(value, str) else value) or {})
    except ValueError:
        raise DataError(
            f"{where} is {brief(value)}; legal is a mapping such as {{'enable_thinking': false}}, or JSON text of one"
        ) from None
    limits = read_limits(arguments, where)
    # Arrow gives every row the keys of all rows, with null for a key that the row does not have
    return {key: v for key, v in arguments.items() if v is not None and key not in limits}, limits
