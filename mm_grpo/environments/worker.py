"""What runs in the worker processes of tools and environments: conversations by number, and their calls one by one.

What goes out is a `CallResult` as JSON and the pixels of its images, so that nothing that a tool makes reaches pickle.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mm_grpo.environments.factories import found_at
from mm_grpo.environments.observation import Limits, Observation, described
from mm_grpo.environments.session import CallResult, Session
from mm_grpo.errors import ToolError
from mm_grpo.user_code.worker import require_unchanged

HEADER = struct.Struct("!I")


@dataclass(frozen=True)
class ToolSources:
    """Imports of a worker: functions by name and the factory, each an address and the SHA-256 of its file as the
    trainer imported it; and the limits on what they answer."""

    functions: Mapping[str, tuple[str, str | None]]
    factory: tuple[str, str | None] | None
    limits: Limits


class ToolWorker:
    """The conversations of this process: from a pickled call to its answer."""

    def __init__(self, sources: ToolSources) -> None:
        self.functions = {name: _loaded(*at) for name, at in sources.functions.items()}
        self.factory = None if sources.factory is None else _loaded(*sources.factory)
        self.limits = sources.limits
        self.sessions: dict[int, Session] = {}

    def __call__(self, body: bytes) -> bytes:
        try:
            number, what, name, packed = pickle.loads(body)
            arguments = pickle.loads(packed)
        except Exception as error:
            result = CallResult(raised=f"cannot be made in a worker process: {described(error)}")
        else:
            if number not in self.sessions:
                self.sessions[number] = Session(self.functions, self.factory, self.limits)
            result = self.sessions[number].answer(what, name, arguments)
            if what == "close" or result.gone is not None:
                del self.sessions[number]
        return packed_answer(result)


def packed_answer(answer: CallResult) -> bytes:
    """An answer as a worker sends it."""
    seen = answer.observation
    shown = None
    if seen is not None:
        shown = {"parts": [p if isinstance(p, str) else p.size for p in seen.parts], "fault": seen.fault}
    text = json.dumps({**vars(answer), "observation": shown}, ensure_ascii=False).encode()
    images = () if seen is None else seen.images
    return b"".join([HEADER.pack(len(text)), text, *(image.tobytes() for image in images)])


def unpacked_answer(body: bytes, limits: Limits) -> CallResult:
    """The answer that a worker sent. Any exception for what is none."""
    (size,) = HEADER.unpack_from(body)
    at = HEADER.size + size
    given = json.loads(body[HEADER.size : at])
    shown, parts = given.pop("observation"), list[str | Image.Image]()
    for part in [] if shown is None else shown["parts"]:
        if not isinstance(part, str):
            width, height = map(int, part)
            if not 0 < width * height <= limits.max_pixels:
                raise ValueError(f"an image of {width} × {height} pixels")
            part = Image.frombytes("RGB", (width, height), body[at : at + 3 * width * height])
            at += 3 * width * height
        parts.append(part)
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes too many")
    return CallResult(None if shown is None else Observation(tuple(parts), shown["fault"]), **given)


def _loaded(address: str, digest: str | None) -> Callable[..., Any]:
    found: Callable[..., Any] = found_at(address, "a tool", ToolError)
    require_unchanged(address, digest)
    return found
