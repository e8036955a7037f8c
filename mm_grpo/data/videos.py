"""Safe video loading: the video of a row becomes a few frames with their times (`Video`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VideoSource:
    """The video of a row, closed, and the part of it that is shown."""

    source: Any
    """A path, a file:// URL, bytes, a mapping with `bytes` or `path`, a data URL (data:video/mp4;base64,...), or a list
    of images, each of which `open_image` opens."""
    fps: float | None = None
    """Frames per second to show of a file; None is `data.video_fps`. Of a list of images: the rate of its frames."""
    start: float | None = None
    """Seconds from the file's first frame to the first that may be shown; None is the first frame."""
    end: float | None = None
    """Seconds from the file's first frame to the last that may be shown; None is the last frame."""
    max_frames: int | None = None
    """Most frames, below `data.video_max_frames`."""
    frames: int | None = None
    """Number of frames, in the place of `fps`, bounded like it (qwen-vl-utils' nframes)."""
