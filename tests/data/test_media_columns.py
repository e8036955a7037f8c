"""Rows whose images nothing would read are refused, whatever holds the rows; `data.text_only` allows them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from reading import colour_of, config, png, write_rows
from reading import rows_refusal as refusal

from mm_grpo.data import media_check
from mm_grpo.data.sources import load_eval, load_train
from mm_grpo.errors import DataError

PICTURE = Image.new("RGB", (4, 4), "red")


def picture(colour: str) -> dict[str, Any]:
    return {"bytes": png(colour), "path": None}


def row(**columns: Any) -> dict[str, Any]:
    return {"prompt": "what is it", "answer": "a", **columns}


def stored(kind: str, rows: list[dict[str, Any]], folder: Path) -> Any:
    if kind == "list":
        return rows
    if kind == "jsonl":
        return write_rows(folder / "rows.jsonl", *rows)
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("kind", ["list", "jsonl", "dataset"])
def test_rows_whose_images_are_not_read_are_refused_whatever_holds_them(kind: str, tmp_path: Path) -> None:
    rows = stored(kind, [row(file_name="a.png"), row(file_name="b.png")], tmp_path)
    message = refusal(rows)
    assert "the column 'file_name' looks like images and is not read" in message
    assert "data.columns.images=file_name" in message and "data.text_only=true" in message
    assert len(load_train(config(text_only=True), rows)) == 2
    assert load_train(config(columns={"images": "file_name"}), rows).fields(1).images == ("b.png",)
    without = stored(kind, [row(), row()], tmp_path)
    assert "(rows looked at: 2 of 2" in refusal(without)
    with pytest.raises(DataError, match=r"^test: no row has an image"):
        load_eval(config(), {"test": without})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", "photos/a.JPG"),
        ("x", "data:image/png;base64,AAAA"),
        ("x", png()),
        ("x", {"bytes": None, "path": "a.png"}),
        ("x", PICTURE),
        ("x", ["nothing", "my cat.jpeg"]),
        ("file_name", "000017"),
    ],
)
def test_what_looks_like_an_image(name: str, value: Any) -> None:
    assert f"the column {name!r} looks like images" in refusal([row(), row(**{name: value})])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_id", 17),
        ("images_seen", "one"),
        ("image_caption", "a cat on a mat"),
        ("solution", "It is a.png and not b"),
        ("sound", {"bytes": b"RIFF0000WAVE", "path": "a.wav"}),
    ],
)
def test_what_does_not_look_like_an_image(name: str, value: Any) -> None:
    assert "no row has an image" in refusal([row(**{name: value})])
    assert len(load_train(config(), [row(image=PICTURE), row(**{name: value})])) == 2


def test_unread_images_warn_and_are_not_decoded(caplog: pytest.LogCaptureFixture) -> None:
    broken = {"bytes": b"\x89PNG and no more", "path": None}
    image = datasets.Image()
    features = datasets.Features({"prompt": datasets.Value("string"), "image": image, "mask": image})
    rows = {"prompt": ["?"] * 3, "image": [{"bytes": png(), "path": None}] * 3, "mask": [broken] * 3}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    with caplog.at_level(logging.WARNING):
        load_train(config(), dataset)
    assert [r.getMessage()[:30] for r in caplog.records] == ["train row 0: the column 'mask'"]
    assert "the column 'mask' looks like images" in refusal(dataset.remove_columns("image"))


CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(image="a.png", image_2="b.png")] * 2, [("train row 0", "'image_2'", "image_2: image_2")]),
        ([row(image="rgb/1.png", depth="depth/1.png")], [("'depth'", "image_2: depth")]),
        ([row(image=PICTURE), row(image=PICTURE, masks=[PICTURE])], [("train row 1", "'masks'")]),
        ([row(image="a.png", chat=CHAT)], [("'chat'", "data.columns.prompt=chat")]),
        ([row(image="a.png", turns=[{"from": "human", "value": "?"}])], [("'turns'",)]),
        ([{"messages": CHAT[:1], "history": [["2 + 2?", "4"]], "image": "a.png"}], [("'history'",)]),
        ([row(image="a.png"), row(), row()], [("train: 2 of 3 rows", "train row 1", "data.text_only=true")]),
        # what is no other image, and no question
        ([row(image="train/a.png", file_name="a.png", url="https://x.org/b.png")], []),
        ([row(image=PICTURE, file_name="a.png", source="coco/a.png")], []),
        ([row(image="a.png", note="see b.png\nand c.png", rejected=CHAT[1:], tools=[{"name": "user"}])], []),
        ([row(image="a.png", options=["b", "c"]) | {"answer": "b.png"}], []),
    ],
)
def test_what_is_not_used_beside_an_image_is_named_once(
    rows: list[dict[str, Any]], words: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    load_train(config(), rows)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == len(words), warnings
    for warning, names in zip(warnings, words, strict=True):
        assert all(name in warning for name in names), warning
    caplog.clear()
    load_train(config(text_only=True), rows)
    assert not caplog.records


def test_numbered_columns_as_a_message_advises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = [row(image=picture("red"), depth=picture("blue"), image_3=None)]
    columns = {"image_1": "image", "image_2": "depth"}
    rows = load_train(config(columns=columns), datasets.Dataset.from_list(table))
    assert [colour_of(image) for image in rows.sample(0).images] == [(255, 0, 0), (0, 0, 255)]
    assert not caplog.records
    features = {"prompt": ["?"], "image_1": [picture("blue")], "image_2": [picture("red")], "image_3": [None]}
    dataset = datasets.Dataset.from_dict(features)
    for name in ("image_1", "image_2", "image_3"):
        dataset = dataset.cast_column(name, datasets.Image())
    rows = load_train(config(), dataset)
    assert [colour_of(image) for image in rows.sample(0).images] == [(0, 0, 255), (255, 0, 0)]
    assert isinstance(rows.fields(0).images[0], dict)  # encoded, as limits of images.py want it
    with caplog.at_level(logging.WARNING):
        load_train(config(columns={"images": "image_1"}), dataset)
    assert ["'image_2'" in record.getMessage() for record in caplog.records] == [True]


def test_of_a_large_dataset_evenly_spaced_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_check, "SAMPLED_ROWS", 10)
    dataset = datasets.Dataset.from_list([row() for _ in range(35)])
    assert "(rows looked at: 9 of 35, from train row 0)" in refusal(dataset)


@pytest.mark.parametrize("key", ["imagse", "promt"])
def test_a_misspelt_key_of_columns_is_refused(key: str) -> None:
    message = refusal([row(picture="a.png")], columns={key: "picture"})
    assert message.startswith(f"data.columns.{key} = 'picture': nothing reads {key!r}; did you mean ")
    for other in ("image_id", "prompt_id", "solution", "videos_seen", "image_size"):  # for rewards
        rows = [{"prompt": "?", "image": PICTURE, "x": 1}]
        assert load_train(config(columns={other: "x"}), rows).columns == (other, "prompt", "image", "x")


@pytest.mark.parametrize("tag", ["<img>", "<|image_pad|>", "<image 1>"])
def test_a_placeholder_without_an_image_is_refused(tag: str) -> None:
    content = [{"type": "text", "text": f"look {tag} here"}]
    rows = [{"prompt": [{"role": "user", "content": content}], "picture": "a.png"}]
    expected = f"train row 0: the prompt holds {tag!r}, and the row has no image (the column 'picture'"
    assert refusal(rows, text_only=True).startswith(expected)


def test_rows_that_cannot_be_read_are_left_to_check() -> None:
    rows = [{"question": "?"}, row(image=PICTURE)]
    assert len(load_train(config(), rows, verify=False)) == 2
    assert "no column 'prompt'" in refusal(rows)
