"""Tools and an environment that a worker process imports, and the ways in which they misbehave."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

from mm_grpo.environments.openenv import OpenEnv
from mm_grpo.types import Video


class Unshowable:
    """What cannot be pickled, written as JSON or shown."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")

    def __str__(self) -> str:
        raise RuntimeError("nor shown")


def misbehave(how: str) -> Any:
    """Do something that no tool should.

    Args:
        how: What.
    """
    if how == "hang":
        time.sleep(1000)
    elif how == "exit":
        os._exit(3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "sys.exit":
        sys.exit(0)
    elif how == "raise":
        raise KeyError("the shelf is empty")
    elif how == "unshowable":
        return Unshowable()
    elif how == "huge image":
        return Image.new("L", (10_000, 9_000))
    elif how == "many images":
        return [Image.new("RGB", (1, 1))] * 3
    elif how == "half a character":
        return "a\ud800b"
    return clip(how)


def clip(how: str) -> Any:
    """A video of some form; other words as they are."""
    if how in ("video", "long video", "torn video"):
        sizes = [(8, 6)] * (40 if how == "long video" else 3) + [(8, 7)] * (how == "torn video")
        frames = tuple(Image.new("RGBA", size, (number, 9, 9)) for number, size in enumerate(sizes))
        video = Video(frames, tuple(7 + number / 3 for number in range(len(frames))), 3)
        return [{"type": "text", "text": "now"}, {"type": "video", "video": video}, frames[1]]
    if how.endswith(".gif"):
        return {"type": "video", "video": how, "fps": 2, "start": 1}
    if how == "frames":
        frames = [Image.new("L", (8, 6), number) for number in range(40)]
        return {"type": "video", "video": frames, "fps": 8}
    return how


def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return str(os.getpid())


class World:
    """An environment that counts, draws and may misbehave at every step of its life."""

    def reset(self, start: int = 0, begins: str = "", ends: str = "", scores: str = "", **row: Any) -> Any:
        self.total, self.ends, self.scores = start, ends, scores
        self.picture = row["images"][0] if row.get("images") else Image.new("L", (8, 6), start)
        misbehave(begins)
        return [{"type": "text", "text": f"begin at {start}"}, self.picture, *row.get("videos", ())]

    def act(self, how: str = "count") -> Any:
        """Count on, or misbehave.

        Args:
            how: What to do.
        """
        self.total += 1
        self.done = self.total >= 100
        if how != "count":
            return misbehave(how)
        return [self.picture.rotate(self.total), f"total {self.total}", {"a": 1}]

    def where(self) -> str:
        """The process."""
        return str(os.getpid())

    def get_reward(self) -> Any:
        if self.scores == "number of numpy":
            import numpy as np

            return np.float64(0.1)
        return misbehave(self.scores) if self.scores else self.total / 3

    def close(self) -> None:
        if self.ends.startswith("/"):
            with Path(self.ends).open("a") as file:
                file.write(json.dumps(self.total) + "\n")
        elif self.ends:
            misbehave(self.ends)


class Impatient(OpenEnv):
    """A server's, which has half a second for each request."""

    timeout = 0.5

    def __init__(self) -> None:
        super().__init__(os.environ["TESTED_OPENENV"])
