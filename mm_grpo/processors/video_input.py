"""A video as transformers' processors and vLLM take it: an array of frames, and metadata about their times."""

from __future__ import annotations

from typing import Any

import numpy as np

from mm_grpo.types import Video

FRAMES_UNCHANGED = {"do_resize": False, "do_sample_frames": False}
"""Options that let transformers' processor of videos neither choose nor resize frames: both is done."""


def frames_array(video: Video) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the frames as an array [F, height, width, 3]."""
    return np.stack([np.asarray(frame) for frame in video.frames])


def video_metadata(video: Video) -> dict[str, Any]:
    """Return the fields of transformers' `VideoMetadata`.

    A frame's index over `fps` is its time, and the rate of the chosen frames (`sampled_fps`) is `video.fps`, also if
    the file has no constant rate: the indices are seconds, of a video with one frame a second.
    """
    seconds = len(video.frames) / video.fps
    return {
        "fps": 1.0,
        "duration": seconds,
        "total_num_frames": seconds,
        "frames_indices": list(video.times),
        "video_backend": "mm_grpo",
    }
