"""The patterns task: fine enough to vanish, balanced, pure, and never the same scene in both splits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from helpers.recipe_scripts import script

from mm_grpo.processors.image_size import resize_to
from mm_grpo.processors.qwen_vl import fixed_size

task: Any = script("zoom/patterns.py")


def pixels(image: Any) -> Any:
    return np.asarray(image).astype(int)


def seen(image: Any) -> Any:
    """An image at the size that the recipe's model gets."""
    limits = {"factor": 28, "min_pixels": 28 * 28, "max_pixels": 84 * 84}
    return resize_to(image, fixed_size(image.height, image.width, **limits))


def shrunk(shown: task.Scene) -> Any:
    return pixels(seen(task.render(shown)))


def with_cell(shown: task.Scene, number: int, cell: task.Cell) -> task.Scene:
    cells = list(shown.cells)
    cells[number] = cell
    return task.Scene(tuple(cells), shown.framed)


def test_patterns_vanish_in_the_shrunk_picture() -> None:
    shown = task.scene(split="train", index=0, framed=4)
    for number in (4, 5):  # the framed cell, and one beside it
        shifts = ((0, 0), (1, 0), (2, 1))
        small = [
            shrunk(with_cell(shown, number, task.Cell(pattern, shift, "blue")))
            for pattern in task.PATTERNS
            for shift in shifts
        ]
        assert max(np.abs(one - small[0]).max() for one in small) <= 1  # of 255 levels
    moved = [shrunk(task.Scene(shown.cells, framed)) for framed in (4, 5)]
    assert np.abs(moved[0] - moved[1]).max() > 100  # the frame is seen


def test_answers_and_places_are_balanced() -> None:
    rows = task.patterns_rows(split="train", size=90, cell_size=27)
    pairs = Counter((row["answer"], row["place"]) for row in rows)
    assert len(pairs) == 45 and set(pairs.values()) == {2}


def test_the_split_is_a_property_of_the_scene_alone() -> None:
    drawn = {
        split: {task.scene(split=split, index=n, seed=seed) for n in range(200) for seed in (0, 1)}
        for split in ("train", "heldout")
    }
    assert all(one.split == split for split, scenes in drawn.items() for one in scenes)
    assert not drawn["train"] & drawn["heldout"]
    first = task.scene(split="train", index=0)
    scenes = [
        with_cell(with_cell(first, 0, task.Cell(p, (x, y), i)), 1, task.Cell(q, (x, 0), j))
        for p in task.PATTERNS
        for q in task.PATTERNS
        for x in range(3)
        for y in range(3)
        for i in ("red", "green", "blue")
        for j in ("red", "green", "blue")
    ]
    share = Counter(one.split for one in scenes)["heldout"] / len(scenes)
    assert abs(share - task.HELDOUT_SHARE) < 0.03  # 2,025 draws: three standard deviations


def test_a_scene_is_known_for_good() -> None:
    # A change here would silently give everyone's shipped base model and figures another data set.
    shown = task.scene(split="train", index=0)
    assert (shown.framed, shown.cells[0]) == (6, task.Cell("rising", (0, 0), "purple"))
