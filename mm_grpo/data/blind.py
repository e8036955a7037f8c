"""Blind controls: which row lends each row its images, and a prompt without its images.

A model that answers as well with the images of other rows, or without any, does not look at them. Exchanging keeps the
form of every prompt and the share of right guesses; removing also shows how much the text alone gives away.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from PIL import Image

from mm_grpo.data.videos import VideoSource
from mm_grpo.types import MEDIA_TYPES


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


def image_key(source: Any, folder: object = None) -> Hashable:
    """Return a key that is equal for equal pictures or videos, as far as that shows without opening a file.

    Relative paths start at `folder`.
    """
    if isinstance(source, VideoSource):
        return source.numbers, tuple(image_key(part, folder) for part in source.sources)
    if isinstance(source, Mapping):
        return image_key(source.get("path") if source.get("bytes") is None else source["bytes"], folder)
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
