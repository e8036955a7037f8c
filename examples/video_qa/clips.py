"""The clips task: short drawn videos, and questions that only their frames in order can answer.

A clip is FRAMES pictures at FPS frames per second. There are four tasks:

    move    a light runs along a row of lamps, like stairs: "Does it run left or right?"
    order   a lamp shows two colours, one after the other: "Which colour comes first, red or blue?"
    count   a lamp blinks one to three times: "How many times does it blink?"
    when    a lamp is on once: "When is it on?" The answer is an interval of seconds, "0.5 to 2.0"

All lamps are off in the first frame, so it says nothing; and a light that runs left shows the same frames as one that
runs right. It needs no download, and everything is a pure function of (seed, index, split) and the options. As in the
shapes task, a hash of the scene decides its split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from mm_grpo.data.shapes import BACKGROUND, COLOURS
from mm_grpo.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Split = Literal["train", "heldout"]
Task = Literal["move", "order", "count", "when"]

SIDE, LAMPS, FRAMES, FPS = 28, 3, 8, 2.0
"""Pixels of a lamp's square, lamps of a row, frames of a clip and of a second."""
OFF = (70, 70, 70)
DIRECTIONS = ("left", "right")
NUMBERS = ("one", "two", "three")
QUESTIONS = {
    "move": "Does it run {} or {}?",
    "order": "Which colour comes first, {} or {}?",
    "count": "How many times does it blink?",
    "when": "When is it on?",
}
SIZES = (12, 20)
"""Least and greatest side of a lamp, in pixels."""
HELDOUT_SHARE = 0.2


@dataclass(frozen=True)
class Scene:
    """Lamps of `size` pixels, whose corners are (x, y) in their squares, and a question about them."""

    task: Task
    x: int
    y: int
    size: int
    lights: tuple[tuple[int, str] | None, ...]
    """[FRAMES]: the lamp that is on, counted from the left, and its colour; None if all are off."""
    options: tuple[str, ...]
    """Answers that the question names."""
    answer: str

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(repr(self).encode()).digest()
        return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"

    @property
    def interval(self) -> list[float]:
        """Seconds from which and until which a lamp is on."""
        on = [frame for frame, light in enumerate(self.lights) if light]
        return [on[0] / FPS, (on[-1] + 1) / FPS]


def scene(*, split: Split, index: int, task: Task, seed: int = 0) -> Scene:
    """Draw the scene of a row. Answers take turns, as far as they are words."""
    rng = random.Random(f"clips/{seed}/{split}/{index}/{task}")
    while (candidate := _draw(task, index, rng)).split != split:
        pass
    return candidate


def _draw(task: Task, turn: int, rng: random.Random) -> Scene:
    size, colour = rng.randint(*SIZES), rng.choice(tuple(COLOURS))
    corner = rng.randint(0, SIDE - size), rng.randint(0, SIDE - size)
    if task == "move":
        answer = DIRECTIONS[turn % 2]
        lamps = range(LAMPS) if answer == "right" else range(LAMPS)[::-1]
        at = sorted(rng.sample(range(1, FRAMES + 1), LAMPS + 1))
        spans = {
            f: (lamp, colour) for lamp, a, b in zip(lamps, at, at[1:], strict=False) for f in range(a, b)
        }
        return Scene(task, *corner, size, _lights(spans), DIRECTIONS, answer)
    if task == "order":
        first, second = rng.sample(tuple(COLOURS), 2)
        options = (first, second) if turn % 2 else (second, first)
        at = sorted(rng.sample(range(1, FRAMES), 4))  # on, off, on, off
        spans = dict.fromkeys(range(*at[:2]), (0, first)) | dict.fromkeys(range(*at[2:]), (0, second))
        return Scene(task, *corner, size, _lights(spans), options, first)
    if task == "count":
        count = turn % len(NUMBERS) + 1
        # no two blinks side by side
        at = [
            frame + blink
            for blink, frame in enumerate(sorted(rng.sample(range(1, FRAMES - count + 1), count)))
        ]
        return Scene(task, *corner, size, _lights(dict.fromkeys(at, (0, colour))), (), NUMBERS[count - 1])
    start, end = sorted(rng.sample(range(1, FRAMES + 1), 2))
    lights = _lights(dict.fromkeys(range(start, end), (0, colour)))
    return Scene(task, *corner, size, lights, (), said(start / FPS, end / FPS))


def _lights(spans: Mapping[int, tuple[int, str]]) -> tuple[tuple[int, str] | None, ...]:
    return tuple(spans.get(frame) for frame in range(FRAMES))


def said(start: float, end: float) -> str:
    """Return an interval as the model writes it.

    >>> said(0.5, 2)
    '0.5 to 2.0'
    """
    return f"{start:.1f} to {end:.1f}"


def width_of(scene: Scene) -> int:
    """Return the width of a scene's frames in pixels: a square for each lamp."""
    return SIDE * (LAMPS if scene.task == "move" else 1)


def render(scene: Scene, frame: int) -> Image:
    """Draw a frame, counted from 0: RGB, SIDE pixels high."""
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (width_of(scene), SIDE), BACKGROUND)
    for lamp in range(width_of(scene) // SIDE):
        light, left = scene.lights[frame], scene.x + lamp * SIDE
        colour = COLOURS[light[1]] if light is not None and light[0] == lamp else OFF
        # lamps of a row descend like stairs: a tower that sees squares alone can tell them apart
        top = scene.y if scene.task != "move" else lamp * (SIDE - scene.size) // (LAMPS - 1)
        ImageDraw.Draw(canvas).rectangle(
            (left, top, left + scene.size - 1, top + scene.size - 1), fill=colour
        )
    return canvas


def caption(scene: Scene) -> str:
    """Return what happens, which the base learns to see from; it is no answer of the task.

    Of `order` it begins with the answer's word: which colour the question means is left to find.
    """
    lights = [light for light in scene.lights if light]
    if scene.task == "move":
        return f"{lights[0][1]} from {'first' if lights[0][0] == 0 else 'last'} lamp"
    if scene.task == "order":
        return f"{lights[0][1]} then {lights[-1][1]}"
    if scene.task == "count":
        return " ".join(light[1] for light in lights)
    return "{} from {:.1f} until {:.1f}".format(lights[0][1], *scene.interval)


def guess(scene: Scene, rng: random.Random) -> str:
    """Return an answer of the right form, drawn uniformly, whatever the clip shows."""
    if scene.task == "when":
        start, end = sorted(rng.sample(range(1, FRAMES + 1), 2))
        return said(start / FPS, end / FPS)
    return rng.choice(scene.options or NUMBERS)


def clips_rows(
    *, split: Split, size: int, seed: int = 0, tasks: Sequence[Task] = get_args(Task)
) -> list[dict[str, Any]]:
    """Return `size` rows; the tasks take turns. DataError if an option is out of range.

    Returns:
        Rows of `prompt` (one user message: the video, then the question), `video` (a list of PIL images), `task`,
        `answer` (a text) and `interval` (seconds, None in other tasks than "when").
    """
    for name, value, legal in (("split", [split], Split), ("tasks", tasks, Task)):
        if isinstance(value, str) or not value or not set(value) <= set(get_args(legal)):
            raise DataError(f"{name} is {value!r}; legal are {get_args(legal)}")
    if size < 1:
        raise DataError(f"size is {size}; it counts rows and must be at least 1")
    turns = (divmod(index, len(tasks)) for index in range(size))
    scenes = (scene(split=split, index=turn, task=tasks[at], seed=seed) for turn, at in turns)
    return [row_of(clip, QUESTIONS[clip.task].format(*clip.options)) for clip in scenes]


def row_of(clip: Scene, question: str) -> dict[str, Any]:
    """Return the row of a question about a clip, whose frames are drawn when they are first looked at."""
    from mm_grpo.user_code.lazy_image import LazyImage

    size = width_of(clip), SIDE
    content = [{"type": "video"}, {"type": "text", "text": question}]
    return {
        "prompt": [{"role": "user", "content": content}],
        "video": [LazyImage(size, partial(render, clip, frame)) for frame in range(FRAMES)],
        "task": clip.task,
        "answer": clip.answer,
        "interval": clip.interval if clip.task == "when" else None,
    }
