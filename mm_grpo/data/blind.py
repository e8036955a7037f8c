"""Blind controls: which row lends each row its images, and a prompt without its images.

A model that answers as well with the images of other rows, or with none, does not look at them. Exchanging keeps the
form of every prompt and the share of right answers that a guess has; removing also shows what the text alone gives
away.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from PIL import Image


def exchange(keys: Sequence[Hashable], rng: random.Random) -> list[int]:
    """For each of n members the member whose images it gets, along one cycle where all `keys` differ.

    `keys` [n] are equal where the images are: no member gets images equal to its own, several questions about one
    picture included. ValueError where that cannot be, because more than half of the keys are equal.

    The right answers are left to chance on purpose: a model that sees answers by the picture that it is shown, and is
    right where that picture has the same answer. Taking only pictures with other answers would push it below a guess.

    >>> exchange(["a", "a", "b", "b"], random.Random(0))
    [2, 3, 0, 1]
    """
    drawn = rng.sample(range(len(keys)), len(keys))
    count = Counter(keys)
    most = max(count.values(), default=0)
    if 2 * most > len(keys):
        raise ValueError(f"{most} of {len(keys)} are equal")
    first = {key: place for place, key in reversed([(p, keys[i]) for p, i in enumerate(drawn)])}
    # equal ones side by side, the most frequent first: a shift by the longest such stretch leaves every stretch
    drawn.sort(key=lambda i: (-count[keys[i]], first[keys[i]]))
    found = [0] * len(keys)
    for place, member in enumerate(drawn):
        found[member] = drawn[(place + most) % len(keys)]
    return found


def image_key(source: Any, folder: object = None) -> Hashable:
    """Equal for sources that are the same picture, as far as that shows without opening a file. Relative paths start
    at `folder`."""
    if isinstance(source, Mapping):
        return image_key(source.get("path") if source.get("bytes") is None else source["bytes"], folder)
    if isinstance(source, bytes | bytearray | memoryview):
        return hashlib.sha256(source).digest()
    if isinstance(source, Image.Image):
        if getattr(source, "fp", None) is not None:  # opened, and not read yet
            return getattr(source, "filename", "") or id(source)
        return source.mode, source.size, hashlib.sha256(source.tobytes()).digest()
    return os.path.join(str(folder or ""), str(source))


def without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages without their parts that stand for images."""
    return tuple(
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [part for part in message["content"] if part["type"] != "image"],
        }
        for message in messages
    )
