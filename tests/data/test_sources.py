"""Where rows come from: files, rows in memory, datasets, tasks; and what is wrong with those that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from PIL import Image

from mm_grpo.config import GRPOConfig, apply_overrides
from mm_grpo.data import shapes
from mm_grpo.data.sources import load
from mm_grpo.errors import DataError

ROW = {"prompt": "?", "answer": 1}


def settings(**fields: Any) -> Any:
    defaults = {
        "columns": {},
        "image_dir": None,
        "system_prompt": None,
        "layout": None,
        "answer_from": None,
    }
    return SimpleNamespace(**defaults | fields)


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(source, settings(**options), "train")
    return str(caught.value)


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def png(colour: str, size: tuple[int, int] = (2, 2)) -> bytes:
    file = BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def colour(image: Image.Image) -> Any:
    return image.getpixel((0, 0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_jsonl_with_images_beside_it(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png("red"))
    path = written(tmp_path / "train.jsonl", ROW, {"prompt": "Which?", "image": "images/a.png"})
    dataset = load(str(path), settings(), "train")
    assert len(dataset) == 2
    assert dataset.sample(0).columns == {"answer": 1}
    assert colour(dataset.sample(1).images[0]) == (255, 0, 0)
    assert dataset.sample(1).uid == "train:1"
    assert dataset.row_name(1) == f"{path}:2"
    elsewhere = load(path, settings(image_dir="/nowhere"), "train")
    with pytest.raises(DataError, match=rf"^{path}:2: image 'images/a.png' does not exist at"):
        elsewhere.sample(1)


def test_jsonl_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "one\xe2\x80\xa8line"}\r\n\n{"prompt": "two"}\n  \n{"prompt": null}'
    )
    assert refusal(path) == f"{path}:5: 'prompt' is null; write a prompt or leave the row out"
    dataset = load(path, settings(), "train", verify=False)
    assert [dataset.row_name(i) for i in range(3)] == [f"{path}:1", f"{path}:3", f"{path}:5"]
    assert dataset.sample(0).messages[0]["content"] == "one\u2028line"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "two"', "is not valid JSON (Expecting ',' delimiter at column 17); mend or remove it"),
        (b"[1]", "a row is a mapping of columns to values; this is a list"),
        (b'{"prompt": "\xff"}', "is not UTF-8 (at byte 12); save it as UTF-8"),
        (
            b'{"prompt": "?", "answer": %s}' % (b"9" * 5000),
            "cannot be read (Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; "
            "use sys.set_int_max_str_digits() to increase the limit); mend or remove it",
        ),
        (
            b"[" * 100000,
            "cannot be read (maximum recursion depth exceeded while decoding a JSON array from a unicode string); "
            "mend or remove it",
        ),
    ],
)
def test_a_broken_jsonl_line_is_named(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n' + line)
    assert refusal(path) == f"{path}:2: {told}"


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps([ROW, {"prompt": None}]))
    assert refusal(path) == f"{path} row 1: 'prompt' is null; write a prompt or leave the row out"
    path.write_text(json.dumps([ROW]))
    assert load(path, settings(), "train").sample(0).columns == {"answer": 1}
    path.write_text(json.dumps(ROW))
    assert (
        refusal(path)
        == f"{path}: holds one dict; legal is a list of rows, or an object with one such list, or a .jsonl file of rows"
    )
    written(path, ROW, ROW)
    assert refusal(path) == (
        f"{path}: is not valid JSON (Extra data at line 2 column 1); if it holds one row a line, call it .jsonl"
    )
    path.write_text("[]")
    assert refusal(path) == f"{path}: is empty; it needs at least 1 row"


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", ROW)
    message = refusal(tmp_path / "trian.jsonl")
    assert (
        f"train: {tmp_path}/trian.jsonl does not exist in {tmp_path}; near names there: 'train.jsonl'"
        in message
    )
    assert "legal is the path of a .jsonl, .json, .csv, .tsv, .parquet or .arrow file" in message
    assert f"does not exist in {tmp_path}; it holds: 'train.jsonl'" in refusal(tmp_path / "xyz")
    assert f"does not exist, nor does its folder {tmp_path}/no" in refusal(tmp_path / "no" / "train.jsonl")
    (tmp_path / "rows.xlsx").touch()
    assert f"train: {tmp_path}/rows.xlsx has the suffix '.xlsx'; legal is" in refusal(tmp_path / "rows.xlsx")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert refusal(tmp_path / "empty.jsonl") == f"{tmp_path}/empty.jsonl: is empty; it needs at least 1 row"


def test_rows_in_memory() -> None:
    dataset = load([ROW], settings(), "eval")
    assert dataset.sample(0).uid == "eval:0"
    assert load(dataset, settings(), "train") is dataset
    assert refusal([]) == "the dataset 'train' has 0 rows; training and evaluation need at least 1"
    assert refusal(row for row in [ROW]).startswith("train: the data is a generator; legal is the path of")
    assert refusal(None).startswith("train: the data is a NoneType; legal is the path of")


def arrow(rows: list[dict[str, Any]], **features: Any) -> Any:
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def test_a_dataset_of_the_library() -> None:
    rows = [
        {"prompt": "?", "images": [{"bytes": png(c), "path": None}], "answer": c} for c in ("red", "blue")
    ]
    stored = arrow(
        rows,
        prompt=datasets.Value("string"),
        images=datasets.List(datasets.Image()),
        answer=datasets.Value("string"),
    )
    dataset = load(stored, settings(), "train")
    assert dataset.columns == ("answer",)
    assert colour(dataset.sample(1).images[0]) == (0, 0, 255)
    assert dataset.sample(1).columns == {"answer": "blue"}
    assert colour(load(stored.select([1]), settings(), "train").sample(0).images[0]) == (0, 0, 255)
    narrow = stored.with_format("python", columns=["prompt", "images"])
    assert load(narrow, settings(), "train").columns == ()


def test_images_of_the_prompt_meet_the_limits_and_those_of_rewards_are_decoded() -> None:
    stored = arrow(
        [
            {
                "prompt": "?",
                "photo": {"bytes": png("red", (20, 30)), "path": None},
                "mask": {"bytes": png("blue"), "path": None},
            }
        ],
        prompt=datasets.Value("string"),
        photo=datasets.Image(),
        mask=datasets.Image(),
    )
    sample = load(stored, settings(columns={"image": "photo"}), "train").sample(0)
    assert sample.images[0].size == (20, 30)
    broken = arrow(
        [{"prompt": "?", "images": [{"bytes": b"no image", "path": None}]}],
        prompt=datasets.Value("string"),
        images=datasets.List(datasets.Image()),
    )
    dataset = load(broken, settings(), "train")  # the library itself would decode here, and raise
    assert [name for name, _ in dataset.check()] == ["train row 0"]
    assert colour(sample.columns["mask"]) == (0, 0, 255)


def test_messages_of_mixed_content_in_arrow() -> None:
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    stored = datasets.Dataset.from_list(
        [{"prompt": [{"role": "user", "content": content}], "image": png("red")}]
    )
    sample = load(stored, settings(), "train").sample(0)
    assert sample.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert colour(sample.images[0]) == (255, 0, 0)


def test_json_columns_are_values() -> None:
    rows = [{"prompt": [{"role": "user", "content": "?"}], "boxes": [{"a": 1}, {"b": [2]}]}]
    stored = arrow(rows, prompt=datasets.Json(), boxes=datasets.List(datasets.Json()))
    sample = load(stored, settings(), "train").sample(0)
    assert sample.messages == ({"role": "user", "content": "?"},)
    assert sample.columns == {"boxes": [{"a": 1}, {"b": [2]}]}


def test_a_transform_makes_the_rows() -> None:
    stored = datasets.Dataset.from_list([{"n": 1}, {"n": 2}])
    stored.set_transform(lambda batch: {"prompt": [f"{n}?" for n in batch["n"]]})
    assert load(stored, settings(), "train").sample(1).messages[0]["content"] == "2?"


def test_splits_and_streams_are_refused() -> None:
    stored = datasets.Dataset.from_list([ROW])
    both = datasets.DatasetDict({"train": stored, "test": stored})
    assert refusal(both) == (
        "the dataset 'train': holds 2 splits ('train', 'test'); give one of them: dataset[split]"
    )
    assert len(load(datasets.DatasetDict({"all": stored}), settings(), "train")) == 1
    assert refusal(stored.to_iterable_dataset()) == (
        "the dataset 'train': is a IterableDataset, without length or index; an epoch is a permutation of all rows, "
        "so load it with streaming=False"
    )


def test_parquet_and_saved_folders(tmp_path: Path) -> None:
    features = {"prompt": datasets.Value("string"), "image": datasets.Image()}
    stored = arrow(
        [{"prompt": "?", "image": {"bytes": png("red"), "path": "a.png"}}, {"prompt": "!", "image": None}],
        **features,
    )
    stored.to_parquet(tmp_path / "rows.parquet")
    stored.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": stored, "test": stored}).save_to_disk(tmp_path / "splits")
    for name in ("rows.parquet", "saved", "splits/train"):
        dataset = load(tmp_path / name, settings(), "train")
        assert len(dataset) == 2
        assert colour(dataset.sample(0).images[0]) == (255, 0, 0)
        assert dataset.sample(1).images == ()
        assert dataset.row_name(1) == f"{tmp_path / name} row 1"
    assert refusal(tmp_path / "splits") == (
        f"{tmp_path}/splits: holds 2 splits ('train', 'test'); give one of them: {tmp_path}/splits:SPLIT, or "
        "dataset[split] in Python"
    )
    assert len(load(f"{tmp_path}/splits:test", settings(), "train")) == 2
    assert (
        refusal(f"{tmp_path}/splits:val") == f"{tmp_path}/splits: has no split 'val'; it has: 'train', 'test'"
    )
    (tmp_path / "other").mkdir()
    assert refusal(tmp_path / "other").startswith(
        f"train: {tmp_path}/other is a folder that save_to_disk did not write"
    )
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    assert f"{tmp_path}/broken.parquet: cannot be read as Parquet (" in refusal(tmp_path / "broken.parquet")
    (tmp_path / "text.parquet").write_text("rows")
    assert f"{tmp_path}/text.parquet: is not a Parquet file" in refusal(tmp_path / "text.parquet")
    (tmp_path / "saved" / "dataset_info.json").write_text("{")
    assert f"{tmp_path}/saved: cannot be read as a saved dataset (" in refusal(tmp_path / "saved")


def test_the_shapes_task() -> None:
    source = {"task": "shapes", "split": "train", "size": 4}
    dataset = load(source, settings(), "train")
    assert len(dataset) == 4
    expected = shapes.shapes_rows(split="train", size=4)
    assert [dataset.sample(i).columns["answer"] for i in range(4)] == [row["answer"] for row in expected]
    assert dataset.sample(2).images[0].tobytes() == expected[2]["images"][0].tobytes()
    assert dataset.row_name(2) == "train (shapes) row 2"
    shuffled = load(source | {"shuffle_images": True}, settings(), "train")
    own = [row["images"][0].tobytes() for row in expected]
    moved = [shuffled.sample(i).images[0].tobytes() for i in range(4)]
    assert sorted(moved) == sorted(own)
    assert all(a != b for a, b in zip(own, moved, strict=True))
    assert source == {"task": "shapes", "split": "train", "size": 4}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"task": "shape"}, "train: the task is 'shape'; known tasks: 'shapes'"),
        ({"task": ["shapes"]}, "train: the task is ['shapes']; known tasks: 'shapes'"),
        ({"size": 4}, "train: the data is a mapping with the keys 'size' and no 'task'; legal is"),
        (
            {"task": "shapes", "split": "train", "sise": 4},
            "train: the task 'shapes' has no option 'sise' (did you mean 'size'?). Its options: 'split', 'size', ",
        ),
        (
            {"task": "shapes", "split": "train"},
            "train: the task 'shapes' needs 'size'. Its options: 'split', ",
        ),
        (
            {"task": "shapes", "split": "train", "size": 0},
            "train: the task 'shapes': size is 0; it counts rows",
        ),
        (
            {"task": "shapes", "split": "train", "size": 4, "shuffle_images": 3},
            "train: shuffle_images is 3; legal is true or false",
        ),
    ],
)
def test_wrong_mappings(source: Any, told: str) -> None:
    assert refusal(source).startswith(told)


def test_the_mapping_in_the_help_is_one_that_loads() -> None:
    (told,) = [field.description for field in GRPOConfig.field_help() if field.path == "data.train"]
    example = told[told.index("{") : told.index("}") + 1]
    assert len(load(apply_overrides({}, [f"train={example}"])["train"], settings())) == 2000


def test_the_package_is_light(tmp_path: Path) -> None:
    path = written(tmp_path / "train.jsonl", ROW)
    code = (
        "import sys; from types import SimpleNamespace; from mm_grpo.data import load; "
        "s = SimpleNamespace(columns={}, image_dir=None, system_prompt=None, "
        "layout=None, answer_from=None); "
        f"load({str(path)!r}, s).sample(0); "
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'vllm'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
