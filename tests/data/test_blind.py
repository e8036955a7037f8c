"""Blind controls: no row gets its own images or equal ones, and prompts without images are whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from reading import colour_of

from mm_grpo.config import DataConfig
from mm_grpo.data.blind import exchange, media_key, reordered, with_frames
from mm_grpo.data.dataset import Dataset
from mm_grpo.data.mixture import MixedDataset
from mm_grpo.errors import DataError


@settings(max_examples=40)
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
    assert media_key(red) == media_key(again) != media_key(blue)
    assert media_key({"bytes": b"abc", "path": "x.png"}) == media_key(b"abc") != media_key(b"abd")
    assert media_key({"bytes": None, "path": "x.png"}) == media_key("x.png") == media_key(Path("x.png"))
    red.save(tmp_path / "red.png")
    opened: Any = Image.open(tmp_path / "red.png")
    assert media_key(opened) == str(tmp_path / "red.png") and opened.fp is not None  # not read


def dataset(*shades: int | tuple[int, ...]) -> Dataset:
    """A row for each, with an image or several of these shades."""
    several = [(each,) if isinstance(each, int) else each for each in shades]
    images = [[Image.new("L", (1, 1), n) for n in each] for each in several]
    return Dataset([{"prompt": f"q{i}", "images": each} for i, each in enumerate(images)], DataConfig())


def shades_of(rows: Dataset) -> list[list[int]]:
    return [[colour_of(image)[0] for image in rows.sample(i).images] for i in range(len(rows))]


def test_shuffled_images_are_another_row_s() -> None:
    plain = dataset(1, 2, 3, (4, 4), (5, 5), ())
    shuffled = plain.control("shuffled")
    own, moved = shades_of(plain), shades_of(shuffled)
    assert all(own[n] != moved[n] for n in range(5)) and moved[3:] == [[5, 5], [4, 4], []]
    assert sorted(moved[:3]) == own[:3]  # one image stays with one image
    assert [shuffled.uid(n) for n in range(6)] == [f"train:{n}" for n in range(6)]
    assert shades_of(dataset(1, 2, 3, (4, 4), (5, 5), ()).control("shuffled")) == moved


@pytest.mark.parametrize(("shades", "words"), [((1, 1, 1, 2), "with 1 .*: 3 of 4"), ((1, ()), "1 of 1")])
def test_images_that_cannot_move_are_refused(shades: tuple[Any, ...], words: str) -> None:
    with pytest.raises(DataError, match=rf"^train row 0: images .*{words} are equal; .*run\.eval_blind"):
        dataset(*shades).control("shuffled")


def coloured(*numbers: int) -> tuple[Image.Image, ...]:
    return tuple(Image.new("RGB", (4, 4), (number, 0, 0)) for number in numbers)


@pytest.mark.parametrize("count", range(3, 14))
def test_no_patch_of_frames_stays_in_place(count: int) -> None:
    frames = coloured(*range(count))
    for seed in range(20):
        moved = reordered(frames, random.Random(seed))
        assert sorted(map(id, moved)) == sorted(map(id, frames))
        assert moved == reordered(frames, random.Random(seed))
        for first in range(0, count, 2):
            assert moved[first : first + 2] != frames[first : first + 2]


def test_frames_without_an_order_stay_and_equal_ones_move_as_far_as_they_can() -> None:
    frames = coloured(5, 6, 5, 5, 6, 6)
    assert reordered(frames, random.Random(0)) is frames
    frames = coloured(5, 5, 5, 5, 5, 5, 6, 7)  # two of the three patches of one colour can go
    moved = [frame.getpixel((0, 0))[0] for frame in reordered(frames, random.Random(0))]  # type: ignore[index]
    assert sorted(moved) == [5] * 6 + [6, 7] and moved[6:] != [6, 7]
    assert sum(moved[first : first + 2] != [5, 5] for first in (0, 2, 4)) == 2


def test_videos_of_a_row_keep_their_times_and_each_uid_has_an_order_of_its_own() -> None:
    video = tiny.video(1, 8)
    sample = tiny.sample("eval:3", "what", (tiny.picture(1),), (video, video))
    moved = with_frames(sample, "frames")
    assert moved.images == sample.images and [v.times for v in moved.videos] == [video.times] * 2
    orders = [[video.frames.index(frame) for frame in v.frames] for v in moved.videos]
    assert all(sorted(order) == list(range(8)) for order in orders) and orders[0] != orders[1]
    assert with_frames(sample, "frames").videos[0].frames == moved.videos[0].frames
    other = with_frames(tiny.sample("eval:4", "what", (), (video,)), "frames").videos[0]
    assert other.frames != moved.videos[0].frames
    first = with_frames(sample, "first_frame").videos[1]
    assert first.frames == (video.frames[0],) * 8
    assert (first.times, first.fps) == (video.times, video.fps)


def test_rows_are_opened_with_their_frames_changed() -> None:
    frames = [tiny.picture(number) for number in range(6)]
    rows = [{"prompt": "what", "video": frames, "answer": "a"}, {"prompt": "what", "answer": "b"}]
    config = DataConfig(text_only=True)
    dataset = Dataset(rows, config)
    (video,) = dataset.sample(0).videos
    for source, uid in ((dataset, "train:0"), (MixedDataset("train", [dataset, dataset], (1, 1)), "train:0")):
        controls = (source.control(name) for name in ("frames", "first_frame"))
        (moved,), (still,) = (control.sample(0).videos for control in controls)
        wanted = reordered(video.frames, random.Random(f"frames/{uid}"))
        every = (moved.frames, wanted, video.frames)
        shown, reordered_ones, plain = ([frame.tobytes() for frame in frames] for frames in every)
        assert shown == reordered_ones != plain
        assert {frame.tobytes() for frame in still.frames} == {video.frames[0].tobytes()}
        assert moved.times == still.times == video.times and len(still.frames) == len(video.frames)
        assert source.control("frames").sample(1).videos == ()
