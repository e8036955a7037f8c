"""Blind controls: which row lends each row its images and videos, and a prompt without its own.

A model that answers as well with the images of other rows, or without any, does not look at them. Exchanging keeps the
form of every prompt and the share of right guesses; removing also shows how much the text alone gives away. Videos can
also keep their frames and lose their order, or keep their first frame alone.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from PIL import Image

from mm_grpo.data.videos import VideoSource
from mm_grpo.messages import MEDIA_TYPES
from mm_grpo.types import Sample


def exchange(keys: Sequence[Hashable], rng: random.Random) -> list[int]:
    """Return for each of n members the member that lends it its images; one cycle if all `keys` differ.

    `keys` [n] are equal for equal images: no member gets images equal to its own, also if several questions are about
    one picture. ValueError if that is impossible, because more than half of the keys are equal.

    Right answers are left to chance on purpose. A model that sees answers by the picture that it is shown, and is right
    if that picture has the same answer. Lending only pictures with other answers would push it below a guess.

    >>> exchange(["a", "a", "b", "b"], random.Random(0))
    [2, 3, 0, 1]
    """
    members = rng.sample(range(len(keys)), len(keys))
    count = Counter(keys)
    longest_run = max(count.values(), default=0)
    if 2 * longest_run > len(keys):
        raise ValueError(f"{longest_run} of {len(keys)} are equal")
    first = {key: place for place, key in reversed([(p, keys[i]) for p, i in enumerate(members)])}
    # equal keys side by side, the most frequent first: a shift by the longest run of equal keys leaves every run
    members.sort(key=lambda i: (-count[keys[i]], first[keys[i]]))
    lenders = [0] * len(keys)
    for place, member in enumerate(members):
        lenders[member] = members[(place + longest_run) % len(keys)]
    return lenders


def media_key(source: Any, folder: object = None) -> Hashable:
    """Return a key that is equal for equal images and for equal parts of videos, as far as no opened file shows it.

    Relative paths start at `folder`.
    """
    if isinstance(source, VideoSource):
        return source.numbers, tuple(media_key(part, folder) for part in source.sources)
    if isinstance(source, Mapping):
        return media_key(source.get("path") if source.get("bytes") is None else source["bytes"], folder)
    if isinstance(source, bytes | bytearray | memoryview):
        return hashlib.sha256(source).digest()
    if isinstance(source, Image.Image):
        if getattr(source, "fp", None) is not None:  # opened, and not read yet
            return getattr(source, "filename", "") or id(source)
        return source.mode, source.size, hashlib.sha256(source.tobytes()).digest()
    return os.path.join(str(folder or ""), str(source))


def without_media(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the messages without their image and video parts."""
    return tuple(
        {**m, "content": [part for part in m["content"] if part["type"] not in MEDIA_TYPES]}
        if not isinstance(m["content"], str)
        else dict(m)
        for m in messages
    )


# the frames of videos ------------------------------------------------------------------------

Frames = tuple[Image.Image, ...]


def has_order(frames: Frames) -> bool:
    """Return True if at least three frames differ: of fewer, another order hardly shows another course of events."""
    return len({frame.tobytes() for frame in frames}) > 2


def reordered(frames: Frames, rng: random.Random) -> Frames:
    """Return frames in another order, or as they are if they have none (`has_order`).

    No two neighbours that become one patch, the frames 2k and 2k + 1, stay in place, if frames differ enough for that.
    """
    keys = [frame.tobytes() for frame in frames]

    def patches_moved(order: Sequence[int]) -> int:
        moved = [keys[place] != keys[frame] for place, frame in enumerate(order)]
        return sum(map(any, zip_longest(moved[::2], moved[1::2])))

    # nearly all orders move all patches, so the best of a hundred does
    orders = (rng.sample(range(len(keys)), len(keys)) for _ in range(100))
    return tuple(frames[place] for place in max(orders, key=patches_moved)) if has_order(frames) else frames


FRAME_CONTROLS: Mapping[str, Callable[[Frames, random.Random], Frames]] = {
    "frames": reordered,
    "first_frame": lambda frames, rng: frames[:1] * len(frames),
}
"""Changes of a video's frames, whose times stay, by their names in `run.eval_blind`."""

CONTROLS: Mapping[str, tuple[str, str]] = {
    "shuffled": ("images shuffled", "the images add"),
    "removed": ("images removed", "the images add"),
    "frames": ("frames shuffled", "the order of frames adds"),
    "first_frame": ("first frame alone", "the later frames add"),
}
"""Words for each kind of `run.eval_blind`: what was done, and what the gap is."""


def with_frames(sample: Sample, control: str) -> Sample:
    """Return the sample with the frames of its videos changed by one of FRAME_CONTROLS, the same at every call."""
    change, rng = FRAME_CONTROLS[control], random.Random(f"{control}/{sample.uid}")
    return replace(sample, videos=tuple(replace(v, frames=change(v.frames, rng)) for v in sample.videos))
