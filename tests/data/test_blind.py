"""Blind controls: no row gets its own images or equal ones, and prompts without images are whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_grpo.config import DataConfig
from mm_grpo.data.blind import exchange, image_key
from mm_grpo.data.dataset import Dataset
from mm_grpo.errors import DataError


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 5))
def test_nobody_gets_an_equal_one_wherever_that_can_be(keys: list[int], seed: int) -> None:
    if 2 * max(keys.count(key) for key in keys) > len(keys):
        with pytest.raises(ValueError, match=f"of {len(keys)} are equal"):
            exchange(keys, random.Random(seed))
        return
    found = exchange(keys, random.Random(seed))
    assert sorted(found) == list(range(len(keys)))
    assert all(keys[i] != keys[lender] for i, lender in enumerate(found))
    assert exchange(keys, random.Random(seed)) == found


def test_one_picture_has_one_key(tmp_path: Path) -> None:
    red, again, blue = (Image.new("RGB", (2, 2), colour) for colour in ("red", "red", "blue"))
    assert image_key(red) == image_key(again) != image_key(blue)
    assert image_key({"bytes": b"abc", "path": "x.png"}) == image_key(b"abc") != image_key(b"abd")
    assert image_key({"bytes": None, "path": "x.png"}) == image_key("x.png") == image_key(Path("x.png"))
    red.save(tmp_path / "red.png")
    opened = Image.open(tmp_path / "red.png")
    assert (
        image_key(opened) == str(tmp_path / "red.png") and getattr(opened, "fp", None) is not None
    )  # not read


def rows(colours: str) -> list[dict[str, Any]]:
    named = {"r": "red", "g": "green", "b": "blue"}
    return [{"prompt": f"q{i}", "image": Image.new("RGB", (2, 2), named[c])} for i, c in enumerate(colours)]


def test_questions_about_one_picture_get_another_one() -> None:
    dataset = Dataset(rows("rrgb"), DataConfig())
    shuffled = dataset.with_shuffled_images()
    for index in range(4):
        own, other = (d.sample(index).images[0].getpixel((0, 0)) for d in (dataset, shuffled))
        assert own != other
    with pytest.raises(DataError, match=r"among the rows with 1 .*: 3 of 4 are equal; .*run.eval_blind:"):
        Dataset(rows("rrrb"), DataConfig()).with_shuffled_images()


def test_removed_images_leave_the_text() -> None:
    dataset = Dataset(rows("rg"), DataConfig())
    blank = dataset.with_images_removed()
    sample = blank.sample(1)
    assert sample.images == () and sample.uid == dataset.sample(1).uid
    parts = [part for message in sample.messages for part in message["content"]]
    assert parts == "q1" or [(part["type"], part["text"]) for part in parts] == [("text", "q1")]
    assert len(dataset.sample(1).images) == 1  # the dataset itself stays as it was
