"""The digits task: handwritten digits of scikit-learn, two pictures in a prompt, and their sum as the answer.

The pictures are the 1,797 of `sklearn.datasets.load_digits` (8 x 8 pixels, 17 levels), which come with scikit-learn
and need no network. Each is drawn larger, dark on light. Only a hash of a picture's pixels decides which split it
belongs to, so that no held-out picture is ever in a training prompt, whatever the seed or the number of rows. The
pictures of a row are a pure function of (seed, index, split). Sums are balanced: a constant answer is right in 1 of
19 rows (in 1 of 9 with `largest: 4`).
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from mm_grpo.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Split = Literal["train", "heldout"]

SIDE = 8
"""Pixels on each side of a picture in scikit-learn."""
LEVELS = 16
"""The darkest ink."""
PAPER, INK = 245, 20
QUESTION = "What is the sum of the two digits?"
HELDOUT_SHARE = 0.2
IMAGE_SIZES = (56, 224)


@dataclass(frozen=True)
class Digit:
    """Picture of a digit: SIDE x SIDE levels of ink from 0 to LEVELS, row by row, and the digit that it shows."""

    levels: bytes
    value: int

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(self.levels).digest()
        return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"


@functools.cache
def digits(split: Split) -> tuple[tuple[Digit, ...], ...]:
    """Return the pictures of a split by the digit that they show, 0 to 9.

    Raises:
        DataError: `split` is unknown, or scikit-learn is not installed.
    """
    if split not in get_args(Split):
        raise DataError(f"split is {split!r}; legal are {get_args(Split)}")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "task digits: its pictures come with scikit-learn, which is not installed; "
            "pip install 'mm_grpo[digits]'"
        ) from None
    pictures, values = load_digits(return_X_y=True)
    by_value: list[list[Digit]] = [[] for _ in range(10)]
    for picture, value in zip(pictures, values, strict=True):
        digit = Digit(bytes(int(level) for level in picture), int(value))
        if digit.split == split:
            by_value[digit.value].append(digit)
    return tuple(map(tuple, by_value))


def render(levels: Sequence[int], image_size: int = 56) -> Image:
    """Return a picture's levels of ink as an RGB image of `image_size` pixels on each side."""
    from PIL import Image

    picture = Image.frombytes(
        "L", (SIDE, SIDE), bytes(PAPER - (PAPER - INK) * level // LEVELS for level in levels)
    )
    return picture.resize((image_size, image_size), Image.Resampling.BICUBIC).convert("RGB")


def pair(*, split: Split, index: int, seed: int = 0, largest: int = 9) -> tuple[Digit, Digit]:
    """Draw the two pictures of a row, of digits from 0 to `largest`. Sums take turns: all are equally frequent."""
    rng = random.Random(f"digits/{seed}/{split}/{index}")
    total = index % (2 * largest + 1)
    first = rng.randint(max(0, total - largest), min(largest, total))
    by_value = digits(split)
    return rng.choice(by_value[first]), rng.choice(by_value[total - first])


def digits_rows(
    *, split: Split, size: int, seed: int = 0, largest: int = 9, image_size: int = 56
) -> list[dict[str, Any]]:
    """Return `size` rows of the task, with digits from 0 to `largest`, in TRL's layout.

    Returns:
        Rows of `prompt` (one user message: two images, then the question), `images` (two PIL images), `answer` (the sum
        as text) and `digits` (the two digits as text, such as "3 5").

    Raises:
        DataError: an option is out of range, or scikit-learn is not installed.
    """
    smallest, biggest = IMAGE_SIZES
    if not smallest <= image_size <= biggest:
        raise DataError(f"image_size is {image_size}; it is in pixels and must lie in {smallest}..{biggest}")
    if not 1 <= largest <= 9:
        raise DataError(f"largest is {largest}; it is the largest digit that is shown and must lie in 1..9")
    if size < 1:
        raise DataError(f"size is {size}; it counts rows and must be at least 1")
    from mm_grpo.user_code.lazy_image import LazyImage

    rows, square = [], (image_size, image_size)
    for index in range(size):
        pictures = pair(split=split, index=index, seed=seed, largest=largest)
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
        rows.append(
            {
                "prompt": [{"role": "user", "content": content}],
                "images": [
                    LazyImage(square, functools.partial(render, digit.levels, image_size))
                    for digit in pictures
                ],
                "answer": str(sum(digit.value for digit in pictures)),
                "digits": " ".join(str(digit.value) for digit in pictures),
            }
        )
    return rows
