"""The shapes task: pure, balanced, truthful about what it paints, and never the same scene in both splits."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from mm_grpo.data.shapes import BACKGROUND, COLOURS, Scene, Thing, render, scene, shapes_rows
from mm_grpo.errors import DataError

KINDS = ("colour", "shape", "count", "position")
RED_CIRCLE = Thing("red", "circle", x=250, y=500, radius=150)
BLUE_SQUARE = Thing("blue", "square", x=700, y=400, radius=200)


def painted(picture: Any, inside: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The box of the pixels that are not background, within a region."""
    left, top, right, bottom = inside
    pixels = itertools.product(range(left, right), range(top, bottom))
    xs, ys = zip(*[at for at in pixels if picture.getpixel(at) != BACKGROUND], strict=True)
    return min(xs), min(ys), max(xs) + 1, max(ys) + 1


def test_colours_and_shapes_are_where_the_scene_says() -> None:
    picture = render(Scene((RED_CIRCLE, BLUE_SQUARE, Thing("green", "triangle", 300, 800, 150)), 100))
    assert picture.size == (100, 100)
    assert picture.mode == "RGB"
    assert picture.getpixel((25, 50)) == COLOURS["red"]
    assert picture.getpixel((11, 36)) == BACKGROUND  # a corner of the circle's box
    assert picture.getpixel((51, 21)) == COLOURS["blue"]  # a corner of the square
    assert picture.getpixel((30, 93)) == COLOURS["green"]
    assert picture.getpixel((17, 70)) == BACKGROUND  # beside the triangle's top
    assert picture.getpixel((17, 93)) == COLOURS["green"]  # its foot


def test_every_box_holds_its_object_and_no_more() -> None:
    image_size = 84
    for row in shapes_rows(split="train", size=12, kinds=KINDS, image_size=image_size, max_objects=3):
        (picture,) = row["images"]
        assert picture.size == (image_size, image_size)
        for thing in row["objects"]:
            x0, y0, x1, y1 = thing["box"]
            assert 0 <= x0 < x1 <= image_size and 0 <= y0 < y1 <= image_size
            found = painted(picture, thing["box"])
            assert all(abs(a - b) <= 1 for a, b in zip(found, thing["box"], strict=True))
        for thing in row["objects"]:
            picture.paste(BACKGROUND, thing["box"])
        assert picture.getcolors() == [(image_size**2, BACKGROUND)]  # nothing outside the boxes


def test_rows_are_a_pure_function_of_their_options() -> None:
    first = shapes_rows(split="train", size=10, seed=3, kinds=KINDS)
    longer = shapes_rows(split="train", size=20, seed=3, kinds=KINDS)[:10]
    for a, b in zip(first, longer, strict=True):
        assert a["images"][0].tobytes() == b["images"][0].tobytes()
        assert {**a, "images": None} == {**b, "images": None}
    other = shapes_rows(split="train", size=10, seed=4, kinds=KINDS)
    assert all(a["objects"] != b["objects"] for a, b in zip(first, other, strict=True))


def test_a_scene_is_known_for_good() -> None:
    # A change here would silently give everyone's shipped base model and figures another data set.
    assert scene(split="train", index=0, seed=0).objects == (
        Thing("blue", "triangle", x=565, y=621, radius=183),
        Thing("purple", "circle", x=420, y=213, radius=187),
    )
    assert scene(split="heldout", index=0, seed=0).objects == (
        Thing("red", "triangle", x=559, y=495, radius=159),
        Thing("purple", "square", x=167, y=580, radius=151),
    )


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_split_is_a_property_of_the_scene_alone(split: Any, kind: Any) -> None:
    for seed, image_size, index in itertools.product((0, 977), (84, 112), range(5)):
        one = scene(split=split, index=index, seed=seed, kind=kind, image_size=image_size)
        assert one.split == split == Scene(one.objects[::-1], 28).split


def test_each_question_has_the_one_answer_that_is_given() -> None:
    for row in shapes_rows(split="train", size=400, kinds=KINDS, max_objects=3):
        things = row["objects"]
        asked = row["prompt"][0]["content"][1]["text"]
        if row["kind"] == "colour":
            word = re.fullmatch(r"What colour is the (\w+)\?", asked)[1]
            found = [thing["colour"] for thing in things if thing["shape"] == word]
        elif row["kind"] == "shape":
            word = re.fullmatch(r"What shape is the (\w+) object\?", asked)[1]
            found = [thing["shape"] for thing in things if thing["colour"] == word]
        elif row["kind"] == "count":
            assert asked == "How many objects are there?"
            found = [("one", "two", "three")[len(things) - 1]]
        else:
            colour, shape = re.fullmatch(r"On which side is the (\w+) (\w+)\?", asked).groups()
            boxes = [thing["box"] for thing in things if (thing["colour"], thing["shape"]) == (colour, shape)]
            found = ["left" if box[0] + box[2] < 84 else "right" for box in boxes]
        assert found == [row["answer"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kinds": ("colour", "size")}, "kinds is .*'size'"),
        ({"image_size": 20}, r"image_size is 20; .* 28\.\.1024"),
        ({"kinds": ("count",), "max_objects": 1}, r"max_objects is 1; .* 2\.\.4"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        shapes_rows(**{"split": "train", "size": 1, **options})
