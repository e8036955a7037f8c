"""Worker process of tools and environments: conversations by number, and their calls one by one.

Results are JSON and pixels, so that nothing that a tool makes reaches pickle.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mm_grpo.data.images import MAX_PIXELS
from mm_grpo.environments.factories import load_code
from mm_grpo.environments.observation import Observation, Part, describe_error, split_part
from mm_grpo.environments.session import CallResult, Session
from mm_grpo.errors import ToolError
from mm_grpo.types import Video
from mm_grpo.user_code.worker import require_unchanged


@dataclass(frozen=True)
class ToolSources:
    """Imports of a worker, each as an address and the SHA-256 of its file as the trainer imported it."""

    functions: Mapping[str, tuple[str, str | None]]
    factory: tuple[str, str | None] | None
    video_limits: Mapping[str, Any]


class ToolWorker:
    """Handler of pickled calls for the conversations of this process."""

    def __init__(self, sources: ToolSources) -> None:
        self.functions = {name: _load(*source) for name, source in sources.functions.items()}
        self.factory = None if sources.factory is None else _load(*sources.factory)
        self.video_limits = sources.video_limits
        self.sessions: dict[int, Session] = {}

    def __call__(self, body: bytes) -> bytes:
        try:
            number, operation, name, packed = pickle.loads(body)
            arguments = pickle.loads(packed)
        except Exception as error:
            result = CallResult(raised=f"cannot be made in a worker process: {describe_error(error)}")
        else:
            if number not in self.sessions:
                self.sessions[number] = Session(self.functions, self.factory, self.video_limits)
            result = self.sessions[number].answer(operation, name, arguments)
            if operation == "close" or result.gone is not None:
                del self.sessions[number]
        return pack_result(result)


def pack_result(result: CallResult) -> bytes:
    """Return a result as a line of JSON, in which media have their sizes, and the pixels of images and frames."""
    observation = result.observation
    parts = [] if observation is None else [*map(split_part, observation.parts)]
    fields = observation and {"parts": [part for part, _ in parts], "fault": observation.fault}
    text = json.dumps({**vars(result), "observation": fields}, ensure_ascii=False).encode()
    pixels = [frame.tobytes() for _, frames in parts for frame in frames]
    return b"".join([text, b"\n", *pixels])


def unpack_result(body: bytes) -> CallResult:
    """Read a result of `pack_result`. Raise any exception for other bytes, which user code may have sent."""
    at = body.index(b"\n") + 1
    result = json.loads(body[:at])
    observation, parts = result.pop("observation"), list[Part]()
    for part in [] if observation is None else observation["parts"]:
        if isinstance(part, str):
            parts.append(part)
            continue
        width, height = map(int, part["size"])
        if not 0 < width * height <= MAX_PIXELS:
            raise ValueError(f"an image of {width} × {height} pixels")
        size, times, frames = 3 * width * height, part["times"], list[Image.Image]()
        for _ in times or [0.0]:
            frames.append(Image.frombytes("RGB", (width, height), body[at : at + size]))
            at += size
        parts.append(Video(tuple(frames), tuple(times), part["fps"]) if times else frames[0])
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes too many")
    fault = None if observation is None else observation["fault"]
    return CallResult(None if observation is None else Observation(tuple(parts), fault), **result)


def _load(address: str, digest: str | None) -> Callable[..., Any]:
    code: Callable[..., Any] = load_code(address, "a tool", ToolError)
    require_unchanged(address, digest)
    return code
