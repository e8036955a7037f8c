"""The dataset: rows as samples, images decoded on demand, and rows told by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mm_grpo.data.dataset import Dataset
from mm_grpo.data.images import MAX_BYTES
from mm_grpo.errors import DataError

COLOURS = ["red", "lime", "blue", "black", "white"]


def settings(**fields: Any) -> Any:
    defaults = {
        "columns": {},
        "image_dir": None,
        "system_prompt": None,
        "layout": None,
        "answer_from": None,
    }
    return SimpleNamespace(**defaults | fields)


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (2, 2), colour)


def rows(n: int = 3) -> list[dict[str, Any]]:
    return [
        {"prompt": "Which colour?", "images": [picture(COLOURS[i])], "answer": COLOURS[i]} for i in range(n)
    ]


def colour(image: Image.Image) -> Any:
    return image.getpixel((0, 0))


class Stored:
    """A map-style dataset that is not a list, and counts how often each row is read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.column_names = list(rows[0])
        self.reads = [0] * len(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        return self.rows[index]


def test_a_sample() -> None:
    dataset = Dataset(rows(), settings(), name="train")
    sample = dataset.sample(2)
    assert sample.uid == "train:2"
    assert sample.messages == (
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]},
    )
    assert [colour(image) for image in sample.images] == [(0, 0, 255)]
    assert sample.videos == ()
    assert sample.columns == {"answer": "blue"}
    assert len(dataset) == 3
    assert dataset.name == "train"
    assert dataset.columns == ("answer",)
    assert dataset.conversational is False
    with pytest.raises(IndexError):
        dataset.sample(3)


def test_equal_rows_have_two_uids_and_a_uid_column_stays_a_column() -> None:
    dataset = Dataset([{"prompt": "?", "uid": "x"}] * 2, settings(), name="eval")
    assert [dataset.sample(i).uid for i in (0, 1)] == ["eval:0", "eval:1"]
    assert dataset.sample(0).columns == {"uid": "x"}


def test_images_are_opened_when_a_sample_is_asked_for(tmp_path: Path) -> None:
    dataset = Dataset([{"prompt": "?", "image": "a.png"}], settings(), name="train", folder=tmp_path)
    with pytest.raises(DataError, match=r"^train row 0: image 'a\.png' cannot be read"):
        dataset.sample(0)
    picture("red").save(tmp_path / "a.png")
    assert colour(dataset.sample(0).images[0]) == (255, 0, 0)
    picture("blue").save(tmp_path / "a.png")
    assert colour(dataset.sample(0).images[0]) == (0, 0, 255)


def test_image_dir_comes_before_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    picture("red").save(tmp_path / "a.png")
    picture("blue").save(tmp_path / "pictures" / "a.png")
    row = [{"prompt": "?", "image": "a.png"}]
    there = Dataset(row, settings(image_dir=str(tmp_path / "pictures")), folder=tmp_path)
    assert colour(there.sample(0).images[0]) == (0, 0, 255)


def test_too_many_bytes_are_refused_and_the_system_prompt_is_the_config_s() -> None:
    with pytest.raises(DataError, match=r"train row 0: .* has 52428801 bytes"):
        Dataset([{"prompt": "?", "image": b"1" * (MAX_BYTES + 1)}], settings()).sample(0)
    assert Dataset(rows(), settings(system_prompt="Be brief.")).sample(0).messages[0] == {
        "role": "system",
        "content": "Be brief.",
    }


def test_one_of_several_images_is_numbered() -> None:
    dataset = Dataset([{"prompt": "?", "images": [picture("red"), b"no image"]}], settings())
    with pytest.raises(DataError, match=r"^train row 0, image 2 of 2: image \(bytes in the row\) is not"):
        dataset.sample(0)


def test_a_list_is_checked_whole_and_other_datasets_by_their_first_row() -> None:
    bad = [{"prompt": "?"}, {"prompt": "?"}, {"prompt": None}]
    with pytest.raises(DataError, match=r"^train row 2: 'prompt' is null"):
        Dataset(bad, settings())
    stored = Stored(bad)
    dataset = Dataset(stored, settings())
    assert stored.reads == [1, 0, 0]
    with pytest.raises(DataError, match=r"^train row 2: 'prompt' is null"):
        dataset.sample(2)
    with pytest.raises(DataError, match=r"^train row 0: no column 'prompt'"):
        Dataset(Stored([{"question": "?"}]), settings())


def test_check_lists_every_bad_row() -> None:
    mixed = [*rows(2), {"prompt": None}, {"prompt": "?", "image": b"no image"}, {"prompt": "?"}]
    dataset = Dataset(mixed, settings(), verify=False)
    found = list(dataset.check())
    assert [name for name, _ in found] == ["train row 2", "train row 3"]
    assert str(found[0][1]).startswith("train row 2: 'prompt' is null")
    assert "is not an image" in str(found[1][1])


def test_columns_are_those_of_all_rows_under_our_names() -> None:
    mixed = [{"problem": "?", "a": 1}, {"problem": "?", "photo": picture("red"), "b": 2}]
    dataset = Dataset(mixed, settings(columns={"prompt": "problem", "image": "photo", "gold": "b"}))
    assert dataset.columns == ("gold", "a")
    assert dataset.sample(0).columns == {"a": 1}
    assert dataset.sample(1).columns == {"gold": 2}
    with pytest.raises(DataError, match=r"data.columns.prompt is 'problen', .*did you mean 'problem'"):
        Dataset(mixed, settings(columns={"prompt": "problen"}))


def test_conversational_is_decided_by_the_first_row() -> None:
    messages = [{"problem": [{"role": "user", "content": "?"}]}]
    assert Dataset(messages, settings(columns={"prompt": "problem"})).conversational is True


def test_the_head_of_a_dataset_keeps_names_and_uids() -> None:
    whole = Dataset(rows(5), settings())
    head = whole.head(2)
    assert (len(head), len(whole), len(whole.head(9))) == (2, 5, 5)
    assert head.sample(1) == whole.sample(1) and head.sample(1).uid == "train:1"
    with pytest.raises(IndexError):
        head.sample(2)
    shuffled = whole.with_shuffled_images().head(2)
    assert colour(shuffled.sample(0).images[0]) != colour(whole.sample(0).images[0])


def test_shuffled_images_are_another_row_s() -> None:
    given = [*rows(5), {"prompt": "No image?", "answer": "none"}]
    given[3]["images"] = [picture("red"), picture("red")]
    given[4]["images"] = [picture("blue"), picture("blue")]
    plain = Dataset(given, settings())
    shuffled = plain.with_shuffled_images()
    own = [[colour(i) for i in plain.sample(n).images] for n in range(6)]
    moved = [[colour(i) for i in shuffled.sample(n).images] for n in range(6)]
    assert all(own[n] != moved[n] for n in range(5))
    assert sorted(own[:3]) == sorted(moved[:3])  # one image stays with one image
    assert moved[3] == own[4]
    assert moved[4] == own[3]
    assert moved[5] == []
    assert [shuffled.sample(n).columns for n in range(6)] == [plain.sample(n).columns for n in range(6)]
    assert shuffled.sample(3).uid == "train:3"
    again = Dataset(given, settings()).with_shuffled_images()
    assert [[colour(i) for i in again.sample(n).images] for n in range(6)] == moved


def test_other_seeds_shuffle_otherwise() -> None:
    dataset = Dataset([{"prompt": "?", "image": Image.new("L", (1, 1), n)} for n in range(40)], settings())

    def shades(seed: int) -> list[Any]:
        shuffled = dataset.with_shuffled_images(seed)
        return [colour(shuffled.sample(n).images[0])[0] for n in range(40)]

    first = shades(0)
    assert sorted(first) == list(range(40))
    assert all(shade != n for n, shade in enumerate(first))
    assert shades(1) != first
    assert colour(dataset.sample(7).images[0]) == (7, 7, 7)  # the dataset itself stays as it was


def test_shuffled_images_in_messages_and_where_they_cannot_move() -> None:
    two = [{"prompt": "?", "image": b"no image"}, {"prompt": "?", "image": picture("red")}]
    with pytest.raises(DataError, match=r"^train row 1 \(images of train row 0\): image .* is not an image"):
        Dataset(two, settings()).with_shuffled_images().sample(1)
    with pytest.raises(DataError, match=r"^train row 0: images cannot be exchanged .*run.eval_blind"):
        Dataset(
            [{"prompt": "?", "image": picture("red")}, {"prompt": "?"}], settings()
        ).with_shuffled_images()
