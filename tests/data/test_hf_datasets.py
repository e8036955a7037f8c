"""Rows that the datasets library holds or reads: its own datasets, Parquet, Arrow, saved ones, the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from reading import colour_of, config, numbered, numbers_of, png, read, refusal, write_rows

from mm_grpo.data import hf_datasets
from mm_grpo.data.sources import load
from mm_grpo.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)
TEXT = datasets.Value("string")


def held(rows: list[dict[str, Any]], **features: Any) -> Any:
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def encoded(colour: str, size: tuple[int, int] = (2, 2)) -> dict[str, Any]:
    return {"bytes": png(colour, size), "path": None}


def test_a_dataset_of_the_library() -> None:
    rows = [{"prompt": "?", "images": [encoded(colour)], "answer": colour} for colour in ("red", "blue")]
    stored = held(rows, prompt=TEXT, images=datasets.List(datasets.Image()), answer=TEXT)
    dataset = read(stored)
    assert dataset.columns == ("prompt", "images", "answer")
    assert colour_of(dataset.sample(1).images[0]) == BLUE
    assert dataset.sample(1).other_columns == {"answer": "blue"}
    assert colour_of(read(stored.select([1])).sample(0).images[0]) == BLUE
    assert read(stored.with_format("python", columns=["prompt", "images"])).columns == ("prompt", "images")
    assert len(read(datasets.DatasetDict({"all": stored}))) == 2


def test_images_of_the_prompt_meet_the_limits_and_those_of_rewards_are_decoded() -> None:
    row = {"prompt": "?", "photo": encoded("red", (20, 30)), "mask": encoded("blue")}
    stored = held([row], prompt=TEXT, photo=datasets.Image(), mask=datasets.Image())
    sample = read(stored, columns={"image": "photo"}).sample(0)
    assert sample.images[0].size == (20, 30) and colour_of(sample.columns["mask"]) == BLUE
    broken = {"prompt": "?", "images": [{"bytes": b"no image", "path": None}]}
    # the library would raise here
    dataset = read(held([broken], prompt=TEXT, images=datasets.List(datasets.Image())))
    with pytest.raises(DataError, match=r"^train row 0: "):
        dataset.sample(0)
    shown = {"photo": datasets.Image(), "by": TEXT}
    inner = [{"prompt": "?", "shown": {"photo": {"bytes": b"no image", "path": None}, "by": "us"}}]
    nested = read(held(inner, prompt=TEXT, shown=shown), columns={"image": "shown.photo"})
    assert nested.fields(0).images == ({"bytes": b"no image", "path": None},)


def test_mixed_parts_json_columns_and_transforms() -> None:
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    row = {"prompt": [{"role": "user", "content": content}], "image": png("red")}
    stored = datasets.Dataset.from_list([row])
    sample = read(stored).sample(0)
    assert sample.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    rows = [{"prompt": [{"role": "user", "content": "?"}], "boxes": [{"a": 1}, {"b": [2]}]}]
    sample = read(held(rows, prompt=datasets.Json(), boxes=datasets.List(datasets.Json()))).sample(0)
    assert sample.messages == ({"role": "user", "content": "?"},)
    assert sample.other_columns == {"boxes": [{"a": 1}, {"b": [2]}]}
    made = datasets.Dataset.from_list([{"n": 1}, {"n": 2}])
    made.set_transform(lambda batch: {"prompt": [f"{n}?" for n in batch["n"]]})
    assert read(made).sample(1).messages[0]["content"] == "2?"


def test_parquet_arrow_and_saved_folders_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "image": encoded("red"), "n": 1}, {"prompt": "!", "image": None, "n": None}]
    stored = held(rows, prompt=TEXT, image=datasets.Image(), n=datasets.Value("int64"))
    stored.to_parquet(tmp_path / "rows.parquet")
    stored.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": stored, "test": stored.select([1])}).save_to_disk(tmp_path / "splits")
    table = stored.data.table
    for name, new in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(tmp_path / name), "wb") as file, new(file, table.schema) as out:
            out.write_table(table)
    for name in ("rows.parquet", "saved", "splits/train", "splits:train", "stream.arrow", "file.arrow"):
        dataset = read(f"{tmp_path}/{name}")
        assert [dataset.sample(i).other_columns for i in range(2)] == [{"n": 1}, {"n": None}], name
        assert colour_of(dataset.sample(0).images[0]) == RED and dataset.sample(1).images == ()
        assert dataset.row_name(1) == f"{tmp_path}/{name.replace(':train', '')} row 1"
    before = sorted(path.name for path in tmp_path.iterdir())
    read(tmp_path / "rows.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # the library's copy is in its cache


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: datasets.DatasetDict(train=d, test=d), ("2 splits", "'train', 'test'", "dataset[split]")),
        (lambda d: d.to_iterable_dataset(), ("IterableDataset", "streaming=False")),
        (lambda d: datasets.DatasetDict(train=d, test=d).save_to_disk("d"), ("2 splits", "d:SPLIT")),
        (lambda d: Path("d.parquet").write_bytes(b"PAR1 and then nothing"), ("d.parquet", "cannot be read")),
    ],
)  # fmt: skip
def test_a_fault_of_the_library_is_one_message(
    make: Any, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make(datasets.Dataset.from_list(numbered(0)))
    capfd.readouterr()
    in_python = isinstance(made, (str, dict)) or hasattr(made, "features")
    source = made if in_python else next(tmp_path.glob("d*")).name
    message = refusal(source)
    assert all(word in message for word in words), message
    assert capfd.readouterr().err == ""


def test_a_name_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "data" / "train.jsonl", *numbered(1))
    monkeypatch.setattr(hf_datasets, "hub_fault", lambda name, dataset: "no network")
    message = refusal("data/train")
    assert "(no network" in message and "'train.jsonl'" in message
    assert "hub it" not in refusal("data/train.csv")


def test_names_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub of one dataset with the configs main, the default, of two splits, and hard, of one."""
    rows = datasets.Dataset.from_list(numbered(5))
    configs = {"main": {"train": rows, "test": rows}, "hard": {"test": rows}}

    def load_dataset(repository: str, config: str | None = None, split: str | None = None) -> Any:
        splits = configs[config or "main"]
        return datasets.DatasetDict(splits) if split is None else splits[split]

    monkeypatch.setattr(hf_datasets, "hub_fault", lambda name, dataset: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert numbers_of("own/er:main:train") == numbers_of("own/er:test") == [5]
    assert load("own/er:hard:test", config().data).row_name(0) == "own/er:hard:test row 0"
    message = refusal("own/er")
    assert "'train', 'test'" in message and "own/er:SPLIT" in message
    assert "own/er:main:val" in refusal("own/er:main:val")


def test_a_dataset_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_datasets, "hub_fault", lambda name, dataset: "no network")
    source = write_rows(tmp_path / "own.jsonl", *numbered(3, 4))
    builder = datasets.load_dataset_builder("json", data_files={"train": str(source)})
    builder.download_and_prepare()
    made = Path(builder.cache_dir)
    info = json.loads((made / "dataset_info.json").read_text())
    cached = tmp_path / "cache" / "own___er" / "default" / "0.0.0" / "abc"
    cached.mkdir(parents=True)
    names = {"config_name": "default", "dataset_name": "er"}
    (cached / "dataset_info.json").write_text(json.dumps({**info, **names}))
    (cached / "er-train.arrow").write_bytes(next(made.glob("*.arrow")).read_bytes())
    assert numbers_of("own/er:train") == numbers_of("own/er") == numbers_of("own/er:default:train") == [3, 4]
    assert "cannot be read (no network" in refusal("own/er:test")
