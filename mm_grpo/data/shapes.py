"""The shapes task: rendered scenes of coloured shapes, and questions about them.

It needs no download, so the demo and the tests use it. A scene is drawn at random and described in thousandths of the
image's side, so it can be rendered at any size. `render` paints it and `shapes_rows` makes rows with questions in TRL's
layout. Everything is a pure function of (seed, index, split) and the options.

Train and held-out never share a scene: a hash of the scene's description alone decides its split, whatever the seed and
the number of rows.

To add a kind of question: its name in `Kind`, a line in `QUESTIONS`, its answers in `answers`, and its demands on the
scene in `_pairs` or `_place`.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from mm_grpo.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Split = Literal["train", "heldout"]
Kind = Literal["colour", "shape", "count", "position"]

COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 20),
    "purple": (150, 50, 190),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three", "four")
SIDES = ("left", "right")
BACKGROUND = (245, 245, 245)

QUESTIONS: dict[str, str] = {
    "colour": "What colour is the {shape}?",
    "shape": "What shape is the {colour} object?",
    "count": "How many objects are there?",
    "position": "On which side is the {colour} {shape}?",
}

UNIT = 1000  # positions and radii are thousandths of the image's side
RADIUS = (140, 190)
GAP = 20  # least distance between the boxes of two objects
OFF_CENTRE = 80  # from the middle line to an object, if its side is asked for
HELDOUT_SHARE = 0.2
SUPERSAMPLING = 4
MAX_OBJECTS = len(NUMBERS)
IMAGE_SIZES = (28, 1024)


@dataclass(frozen=True, order=True)
class Thing:
    """Object with its centre and radius (half its box's side) in thousandths of the image's side."""

    colour: str
    shape: str
    x: int
    y: int
    radius: int

    def box(self, image_size: int) -> tuple[int, int, int, int]:
        """Return the smallest box of whole pixels, (x0, y0, x1, y1), around the object in an image of this side."""
        low = [math.floor((c - self.radius) * image_size / UNIT) for c in (self.x, self.y)]
        high = [math.ceil((c + self.radius) * image_size / UNIT) for c in (self.x, self.y)]
        return low[0], low[1], high[0], high[1]


@dataclass(frozen=True)
class Scene:
    """Objects of an image, and its side in pixels. A question is about the first object."""

    objects: tuple[Thing, ...]
    size: int

    @property
    def split(self) -> Split:
        """The scene's split, independent of the order of its objects and the size of its image."""
        digest = hashlib.sha256(repr(sorted(self.objects)).encode()).digest()
        return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"


def answers(kind: Kind, max_objects: int = 2) -> tuple[str, ...]:
    """Return the answers to a kind of question, in the order in which rows cycle through them.

    >>> answers("count", max_objects=3)
    ('one', 'two', 'three')
    """
    classes = {"colour": tuple(COLOURS), "shape": SHAPES, "count": NUMBERS[:max_objects], "position": SIDES}
    return classes[kind]


def scene(
    *,
    split: Split,
    index: int,
    seed: int = 0,
    kind: Kind = "colour",
    answer: str | None = None,
    image_size: int = 84,
    max_objects: int = 2,
) -> Scene:
    """Draw the scene of one row, in which a question of `kind` has exactly one answer.

    That is `answer` if given: one of `answers(kind, max_objects)`. DataError if an option is out of range.
    """
    _check(split=split, kinds=(kind,), image_size=image_size, max_objects=max_objects)
    legal = answers(kind, max_objects)
    rng = random.Random(f"shapes/{seed}/{split}/{index}/{kind}/{answer}/{max_objects}")
    if answer is None:
        answer = rng.choice(legal)
    while True:
        objects = _place(_pairs(kind, answer, max_objects, rng), kind, answer, rng)
        if objects is not None and (candidate := Scene(objects, image_size)).split == split:
            return candidate


def render(scene: Scene) -> Image:
    """Render the scene as an RGB image of scene.size by scene.size pixels, with smooth edges."""
    from PIL import Image, ImageDraw

    side = scene.size * SUPERSAMPLING
    canvas = Image.new("RGB", (side, side), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for thing in scene.objects:
        x0, y0, x1, y1 = (
            (centre + sign * thing.radius) * side / UNIT for sign in (-1, 1) for centre in (thing.x, thing.y)
        )
        fill = COLOURS[thing.colour]
        if thing.shape == "circle":
            draw.ellipse((x0, y0, x1 - 1, y1 - 1), fill=fill)  # Pillow draws the last pixel too
        elif thing.shape == "square":
            draw.rectangle((x0, y0, x1 - 1, y1 - 1), fill=fill)
        else:
            draw.polygon([((x0 + x1) / 2, y0), (x1 - 1, y1 - 1), (x0, y1 - 1)], fill=fill)
    return canvas.resize((scene.size, scene.size), Image.Resampling.BOX)


def shapes_rows(
    *,
    split: Split,
    size: int,
    seed: int = 0,
    kinds: Sequence[Kind] = ("colour", "shape"),
    image_size: int = 84,
    max_objects: int = 2,
) -> list[dict[str, Any]]:
    """Make `size` rows of the task, in TRL's layout. DataError if an option is out of range.

    Row i asks a question of kind `kinds[i % len(kinds)]`, and each kind cycles through its answers, so all classes are
    equally frequent: a constant answer is right in 1 of 5 colour and 1 of 3 shape questions.

    Returns:
        Rows of `prompt` (one user message: the image, then the question), `images` (one PIL image, which is drawn when
        it is read), `answer` (a word), `kind`, and `objects`, a list of `colour`, `shape` and `box`, (x0, y0, x1, y1)
        in pixels of the image. The question is about the first object.
    """
    _check(split=split, kinds=kinds, image_size=image_size, max_objects=max_objects)
    if size < 1:
        raise DataError(f"size is {size}; it counts rows and must be at least 1")
    from mm_grpo.user_code.lazy_image import LazyImage

    rows = []
    for index in range(size):
        turn, kind_index = divmod(index, len(kinds))
        kind = kinds[kind_index]
        legal = answers(kind, max_objects)
        answer = legal[turn % len(legal)]
        options: dict[str, Any] = {"seed": seed, "image_size": image_size, "max_objects": max_objects}
        picture = scene(split=split, index=index, kind=kind, answer=answer, **options)
        content = [{"type": "image"}, {"type": "text", "text": question(picture, kind)}]
        rows.append(
            {
                "prompt": [{"role": "user", "content": content}],
                "images": [LazyImage((image_size, image_size), partial(render, picture))],
                "answer": answer,
                "kind": kind,
                "objects": [
                    {"colour": thing.colour, "shape": thing.shape, "box": thing.box(image_size)}
                    for thing in picture.objects
                ],
            }
        )
    return rows


def question(scene: Scene, kind: Kind) -> str:
    """Return the question of this kind about the scene's first object."""
    target = scene.objects[0]
    return QUESTIONS[kind].format(colour=target.colour, shape=target.shape)


def _check(*, split: str, kinds: Sequence[str], image_size: int, max_objects: int) -> None:
    if split not in get_args(Split):
        raise DataError(f"split is {split!r}; legal are {get_args(Split)}")
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(get_args(Kind)):
        raise DataError(f"kinds is {kinds!r}; give a list of kinds out of {get_args(Kind)}")
    min_objects = 2 if "count" in kinds else 1  # with one object every count is one
    for name, value, low, high in (
        ("image_size", image_size, *IMAGE_SIZES),
        ("max_objects", max_objects, min_objects, MAX_OBJECTS),
    ):
        if not low <= value <= high:
            raise DataError(f"{name} is {value}; with kinds {kinds} it must lie in {low}..{high}")


def _pairs(kind: Kind, answer: str, max_objects: int, rng: random.Random) -> list[tuple[str, str]]:
    """Draw different (colour, shape) pairs, with one answer to the question, which is about the first."""
    count = NUMBERS.index(answer) + 1 if kind == "count" else rng.randint(1, max_objects)
    colour = answer if kind == "colour" else rng.choice(tuple(COLOURS))
    shape = answer if kind == "shape" else rng.choice(SHAPES)
    pairs = [(colour, shape)]
    free = [
        (other_colour, other_shape)
        for other_colour in COLOURS
        for other_shape in SHAPES
        if (other_colour, other_shape) != (colour, shape)
        and not (kind == "colour" and other_shape == shape)
        and not (kind == "shape" and other_colour == colour)
    ]
    return pairs + rng.sample(free, count - 1)


def _place(
    pairs: list[tuple[str, str]], kind: Kind, answer: str, rng: random.Random
) -> tuple[Thing, ...] | None:
    """Place things inside the image and apart from each other; return None if there is no room for one."""
    placed: list[Thing] = []
    for colour, shape in pairs:
        for _ in range(20):
            radius = rng.randint(*RADIUS)
            low, high = radius, UNIT - radius
            x, y = rng.randint(low, high), rng.randint(low, high)
            if kind == "position" and not placed:
                x = rng.randint(low, UNIT // 2 - OFF_CENTRE)
                x = x if answer == "left" else UNIT - x
            if all(max(abs(x - t.x), abs(y - t.y)) >= radius + t.radius + GAP for t in placed):
                placed.append(Thing(colour, shape, x, y, radius))
                break
        else:
            return None
    return tuple(placed)
