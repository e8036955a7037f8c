"""The patterns task: pictures whose answer cannot be read at the size that a model gets, only in a cut of them.

A picture has three by three cells. Each is filled with a pattern of thin lines or dots, and a frame around one of them
is all that tells which pattern is asked for. The pattern repeats every PERIOD pixels and has the same share of ink
everywhere, so that shrinking the picture PERIOD times leaves one even colour, the same for all patterns; frame and
colours are coarse and stay. Looking at the framed cell at full size (the environment `zoom`) answers the question.

It needs no download, and everything is a pure function of (seed, index, split) and the options. As in the shapes task,
a hash of the scene's description, and nothing else, decides which split a scene belongs to.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from mm_grpo.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Split = Literal["train", "heldout"]
Pixels = tuple[int, int, int, int]

PERIOD = 3
"""Pixels after which every pattern repeats, and times that a picture is shrunk to lose it."""
INKED: dict[str, tuple[tuple[int, int], ...]] = {
    "horizontal": ((0, 0), (1, 0), (2, 0)),
    "vertical": ((0, 0), (0, 1), (0, 2)),
    "rising": ((0, 2), (1, 1), (2, 0)),
    "falling": ((0, 0), (1, 1), (2, 2)),
    "dotted": ((0, 0), (1, 0), (0, 1)),
}
"""The answers, each with the (x, y) that are inked in a tile of PERIOD by PERIOD pixels: as many in all."""
PATTERNS = tuple(INKED)
INKS = {"red": (190, 40, 40), "green": (30, 130, 50), "blue": (40, 70, 200), "purple": (130, 50, 170)}
PAPER = (245, 245, 245)
FRAME = (0, 0, 0)
SIDE = 3  # cells in a row of a picture, and rows
COLUMNS, ROWS = ("left", "middle", "right"), ("top", "middle", "bottom")
QUESTION = "Which pattern is in the frame?"
FRAME_SHARE = 9  # a frame's width goes so many times into the side of its cell
FADE_SHARE = 0.25  # of the cell's side, over which its pattern fades out towards the frame
CELL_SIZES = (27, 270)
HELDOUT_SHARE = 0.2
CUTS = ((0, 333), (334, 667), (667, 1000))
"""Edges of columns and rows of cells, in thousandths of a picture, as a call of `zoom` writes them."""


@dataclass(frozen=True)
class Cell:
    """Cell of a picture: its pattern, the shift to the right and down in pixels, and the name of its ink."""

    pattern: str
    shift: tuple[int, int]
    ink: str


@dataclass(frozen=True)
class Scene:
    """Cells of a picture row by row, and the index of the framed one."""

    cells: tuple[Cell, ...]
    framed: int

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(repr(self).encode()).digest()
        return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"

    @property
    def answer(self) -> str:
        return self.cells[self.framed].pattern


def place(cell: int) -> str:
    """Name a cell's place in its picture.

    >>> place(0), place(5)
    ('top left', 'middle right')
    """
    row, column = divmod(cell, SIDE)
    return f"{ROWS[row]} {COLUMNS[column]}"


def bbox(cell: int) -> list[int]:
    """Return the cell as [left, top, right, bottom] in thousandths of the picture's sides.

    >>> bbox(5)
    [667, 334, 1000, 667]
    """
    row, column = divmod(cell, SIDE)
    return [CUTS[column][0], CUTS[row][0], CUTS[column][1], CUTS[row][1]]


def box(cell: int, cell_size: int) -> Pixels:
    """Return the cell as (x0, y0, x1, y1) in pixels, if a cell has `cell_size` pixels on each side."""
    row, column = divmod(cell, SIDE)
    x, y = column * cell_size, row * cell_size
    return x, y, x + cell_size, y + cell_size


def scene(
    *, split: Split, index: int, seed: int = 0, answer: str | None = None, framed: int | None = None
) -> Scene:
    """Draw the scene of a row, with random `answer` and `framed` if they are None.

    Raises:
        DataError: an option is out of range.
    """
    if split not in get_args(Split):
        raise DataError(f"split is {split!r}; legal are {get_args(Split)}")
    if answer is not None and answer not in INKED:
        raise DataError(f"answer is {answer!r}; legal are {PATTERNS}")
    if framed is not None and framed not in range(SIDE**2):
        raise DataError(f"framed is {framed!r}; it counts cells row by row and must lie in 0..{SIDE**2 - 1}")
    rng = random.Random(f"patterns/{seed}/{split}/{index}/{answer}/{framed}")
    while True:
        cells = [
            Cell(
                rng.choice(PATTERNS), (rng.randrange(PERIOD), rng.randrange(PERIOD)), rng.choice(tuple(INKS))
            )
            for _ in range(SIDE**2)
        ]
        at = rng.randrange(SIDE**2) if framed is None else framed
        if answer is not None:
            cells[at] = Cell(answer, cells[at].shift, cells[at].ink)
        candidate = Scene(tuple(cells), at)
        if candidate.split == split:
            return candidate


def render(scene: Scene, cell_size: int = 84) -> Image:
    """Draw the scene at full size: RGB, 3 * cell_size pixels on each side."""
    import numpy as np
    from PIL import Image

    _check_cell_size(cell_size)
    canvas = np.empty((SIDE * cell_size, SIDE * cell_size, 3), np.uint8)
    # A pattern that ended abruptly would leave traces along its edge in the shrunk picture, so it fades out.
    width = cell_size // FRAME_SHARE
    from_edge = np.minimum(np.arange(cell_size), np.arange(cell_size)[::-1])
    ramp = np.clip((from_edge - width + 1) / (FADE_SHARE * cell_size), 0, 1)
    ramp = (1 - np.cos(np.pi * ramp)) / 2
    strength = (ramp[:, None] * ramp)[..., None]
    for number, cell in enumerate(scene.cells):
        tile = np.full((PERIOD, PERIOD, 3), PAPER, float)
        for x, y in INKED[cell.pattern]:
            tile[(y + cell.shift[1]) % PERIOD, (x + cell.shift[0]) % PERIOD] = INKS[cell.ink]
        even = tile.mean((0, 1))
        repeated = np.tile(tile, (cell_size // PERIOD, cell_size // PERIOD, 1))
        x0, y0, x1, y1 = box(number, cell_size)
        canvas[y0:y1, x0:x1] = np.rint(even + strength * (repeated - even))
        if number == scene.framed:
            inside = canvas[y0:y1, x0:x1]
            inside[:width] = inside[-width:] = FRAME
            inside[:, :width] = inside[:, -width:] = FRAME
    return Image.fromarray(canvas)


def patterns_rows(*, split: Split, size: int, seed: int = 0, cell_size: int = 84) -> list[dict[str, Any]]:
    """Return `size` rows of the task, in TRL's layout; answers and framed cells are equally frequent.

    Returns:
        Rows of `prompt` (one user message: the image, then the question), `images` (one PIL image at full size),
        `answer` (a word), `place` (the framed cell's place, in words) and `box` (the framed cell as (x0, y0, x1, y1)
        in pixels of the image).

    Raises:
        DataError: an option is out of range; the message says what is legal.
    """
    _check_cell_size(cell_size)
    if size < 1:
        raise DataError(f"size is {size}; it counts rows and must be at least 1")
    from mm_grpo.user_code.lazy_image import LazyImage

    rows, side = [], SIDE * cell_size
    for index in range(size):
        answer = PATTERNS[index % len(PATTERNS)]
        # 9 cells and 5 answers have no common divisor, so that all pairs of them take turns
        picture_scene = scene(split=split, index=index, seed=seed, answer=answer, framed=index % SIDE**2)
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        rows.append(
            {
                "prompt": [{"role": "user", "content": content}],
                "images": [LazyImage((side, side), partial(render, picture_scene, cell_size))],
                "answer": answer,
                "place": place(picture_scene.framed),
                "box": box(picture_scene.framed, cell_size),
            }
        )
    return rows


def _check_cell_size(cell_size: int) -> None:
    smallest, biggest = CELL_SIZES
    if not smallest <= cell_size <= biggest or cell_size % PERIOD:
        raise DataError(
            f"cell_size is {cell_size}; it is the side of a cell in pixels, and must be a multiple of {PERIOD} in "
            f"{smallest}..{biggest}"
        )
