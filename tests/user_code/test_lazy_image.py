"""Pictures that are drawn when they are first read."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.configs import small_config
from PIL import Image

from mm_grpo.data import Dataset
from mm_grpo.data.shapes import render, scene, shapes_rows
from mm_grpo.user_code.kept_state import own_copy
from mm_grpo.user_code.lazy_image import LazyImage, with_pil_images


def counted(calls: list[int]) -> LazyImage:
    def draw() -> Image.Image:
        calls.append(1)
        return Image.new("RGB", (4, 2), (10, 20, 30))

    return LazyImage((4, 2), draw)


USES = {
    "array": lambda image: np.asarray(image).tolist() == [[[10, 20, 30]] * 4] * 2,
    "copy": lambda image: image.copy().tobytes() == bytes((10, 20, 30)) * 8,
    "equal": lambda image: image == Image.new("RGB", (4, 2), (10, 20, 30)),
    "equal to it": lambda image: Image.new("RGB", (4, 2), (10, 20, 30)) == image,
    "pickle": lambda image: type(pickle.loads(pickle.dumps(image))) is Image.Image,
    "deep copy": lambda image: copy.deepcopy(image).getpixel((0, 0)) == (10, 20, 30),
    "paste": lambda image: Image.new("RGB", (9, 9)).paste(image) is None,
    "convert": lambda image: image.convert("L").getpixel((0, 0)) == 18,
}


@pytest.mark.parametrize("use", USES)
def test_a_picture_is_drawn_once_when_it_is_used(use: str) -> None:
    calls: list[int] = []
    image = counted(calls)
    assert isinstance(image, Image.Image) and (image.size, image.mode, calls) == ((4, 2), "RGB", [])
    assert USES[use](image)
    assert USES[use](image)
    assert (calls, type(image)) == ([1], Image.Image)


def test_threads_that_read_one_picture_at_once_see_the_same() -> None:
    with ThreadPoolExecutor(8) as pool:
        for index in range(20):
            shown = scene(split="train", index=index)
            image = LazyImage((84, 84), lambda shown=shown: render(shown))
            assert set(pool.map(lambda _: image.tobytes(), range(8))) == {render(shown).tobytes()}  # noqa: B023


def test_a_column_of_videos_is_left_as_it_is_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "long.mp4"
    with file.open("wb") as film:
        film.write(b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41")
        film.truncate(2**40)  # which fits in no memory, and takes no place on the disk
    rows = [{"bytes": None, "path": str(file)}, {"bytes": file.open("rb").read(99), "path": None}]
    assert with_pil_images(rows) == rows and own_copy(rows) == rows


def test_reading_rows_draws_none_of_their_pictures() -> None:
    rows = shapes_rows(split="train", size=4)
    dataset = Dataset(rows, small_config("m").data)
    assert [type(row["images"][0]) for row in rows] == [LazyImage] * 4
    assert dataset.sample(2).images[0] == render(scene(split="train", index=2, kind="colour", answer="green"))
    assert [type(row["images"][0]) for row in rows] == [LazyImage, LazyImage, Image.Image, LazyImage]
