"""The dataset: rows as samples, images decoded on demand, and rows told by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from reading import colour_of

from mm_grpo.config import DataConfig
from mm_grpo.data.dataset import Dataset
from mm_grpo.errors import DataError

COLOURS = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255)}


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (2, 2), colour)


def dataset(rows: Any, **settings: Any) -> Dataset:
    return Dataset(rows, DataConfig(**settings))


def three() -> list[dict[str, Any]]:
    return [{"prompt": "Which colour?", "images": [picture(c)], "answer": c} for c in COLOURS]


class Stored:
    """A map-style dataset that is not a list, and counts how often each row is read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])
        self.reads = [0] * len(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        return self.rows[index]


def test_a_sample() -> None:
    made = dataset(three())
    sample = made.sample(2)
    assert (sample.uid, sample.videos, sample.other_columns) == ("train:2", (), {"answer": "blue"})
    assert sample.columns == {**three()[2], "images": [picture("blue")]}
    content = [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    assert sample.messages == ({"role": "user", "content": content},)
    assert [colour_of(image) for image in sample.images] == [COLOURS["blue"]]
    assert (len(made), made.name, made.conversational) == (3, "train", False)
    assert made.columns == ("prompt", "images", "answer")
    with pytest.raises(IndexError):
        made.sample(3)
    system = dataset(three(), system_prompt="Be brief.").sample(0).messages[0]
    assert system == {"role": "system", "content": "Be brief."}


def test_images_are_opened_when_a_sample_is_asked_for(tmp_path: Path) -> None:
    row = [{"prompt": "?", "image": "a.png"}]
    made = Dataset(row, DataConfig(), folder=tmp_path)
    with pytest.raises(DataError, match=r"^train row 0: image 'a\.png' cannot be read"):
        made.sample(0)
    picture("red").save(tmp_path / "a.png")
    assert colour_of(made.sample(0).images[0]) == COLOURS["red"]
    picture("blue").save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"^train row 0: image 'a\.png' changed"):
        made.sample(0)
    (tmp_path / "pictures").mkdir()
    picture("lime").save(tmp_path / "pictures" / "a.png")
    there = Dataset(row, DataConfig(image_dir=str(tmp_path / "pictures")), folder=tmp_path)
    assert colour_of(there.sample(0).images[0]) == COLOURS["lime"]


def test_a_list_is_checked_whole_and_other_datasets_by_their_first_row() -> None:
    bad = [{"prompt": "?"}, {"prompt": "?"}, {"prompt": None}]
    with pytest.raises(DataError, match=r"^train row 2: 'prompt' is null"):
        dataset(bad)
    stored = Stored(bad)
    made = dataset(stored)
    assert stored.reads == [1, 0, 0]
    with pytest.raises(DataError, match=r"^train row 2: 'prompt' is null"):
        made.sample(2)
    with pytest.raises(DataError, match=r"^train row 0: no column 'prompt'"):
        dataset(Stored([{"question": "?"}]))


def test_columns_are_those_of_all_rows_under_our_names() -> None:
    mixed = [{"problem": "?", "a": 1}, {"problem": "?", "photo": picture("red"), "b": 2}]
    made = dataset(mixed, columns={"prompt": "problem", "image": "photo", "gold": "b"})
    assert made.columns == ("prompt", "image", "gold", "a", "problem", "photo", "b")
    assert [made.sample(i).other_columns for i in (0, 1)] == [{"a": 1}, {"gold": 2}]
    with pytest.raises(DataError, match=r"data.columns.prompt is 'problen', .*did you mean 'problem'"):
        dataset(mixed, columns={"prompt": "problen"})
    messages = [{"problem": [{"role": "user", "content": "?"}]}]
    assert dataset(messages, columns={"prompt": "problem"}).conversational is True


def test_the_head_of_a_dataset_keeps_names_and_uids() -> None:
    whole = dataset(three())
    head = whole.head(2)
    assert (len(head), len(whole), len(whole.head(9))) == (2, 3, 3)
    assert head.sample(1) == whole.sample(1) and head.sample(1).uid == "train:1"
    with pytest.raises(IndexError):
        head.sample(2)
    shuffled = whole.control("shuffled").head(2)
    assert colour_of(shuffled.sample(0).images[0]) != colour_of(whole.sample(0).images[0])


def test_a_row_past_any_context_is_refused_before_an_image_is_opened() -> None:
    """The images are not there, which would be said if one were opened."""
    for row, size in (
        ({"prompt": "a" * 10_000_000, "image": "none.png"}, "10,000,000 characters"),
        ({"prompt": "what", "images": ["none.png"] * 10_000}, "10,000 images"),
    ):
        with pytest.raises(DataError, match=f"^train row 0: .*{size}"):
            dataset([row]).sample(0)
