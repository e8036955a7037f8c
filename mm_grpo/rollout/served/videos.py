"""Frames of videos on their way to a vLLM server, and the server's reader of them.

vLLM's own forms of a video are files, whose frames it would choose again, and JPEG frames without times. So the frames
go as PNG in a ZIP archive with their metadata (`archive_of`). The server gets `ReadFrames` as a middleware: vLLM
makes that in the process that reads media. It registers the reader under the name BACKEND:

    --middleware mm_grpo.rollout.served.videos.ReadFrames --media-io-kwargs '{"video": {"video_backend": "mm_grpo"}}'
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
from PIL import Image

from mm_grpo.files import encoded_image
from mm_grpo.processors.video_input import video_metadata
from mm_grpo.rollout.served.server_key import App, Receive, Scope, Send
from mm_grpo.types import Video

BACKEND = "mm_grpo"
MIDDLEWARE = "mm_grpo.rollout.served.videos.ReadFrames"
METADATA = "metadata.json"


def archive_of(video: Video) -> bytes:
    """Write a video's frames and metadata as a ZIP archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # PNG is compressed already
        archive.writestr(METADATA, json.dumps(video_metadata(video)))
        for number, frame in enumerate(video.frames):
            archive.writestr(f"{number:06}.png", encoded_image(frame))
    return buffer.getvalue()


def read_frames(data: bytes) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], dict[str, Any]]:
    """Return the frames [F, height, width, 3] and the metadata of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = sorted(set(archive.namelist()) - {METADATA})
        frames = [np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in names]
        return np.stack(frames), json.loads(archive.read(METADATA)) | {"do_sample_frames": False}


class ReadFrames:
    """ASGI middleware that passes everything on, in a server that reads archives of videos."""

    def __init__(self, app: App) -> None:
        from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

        class Reader(VideoLoader):
            @classmethod
            def load_bytes(cls, data: bytes, **kwargs: Any) -> Any:
                return read_frames(data)

        VIDEO_LOADER_REGISTRY.register(BACKEND)(Reader)
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
