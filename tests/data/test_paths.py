"""What strings name: shards, splits, globs, lists, links, pipes; and what of it is not one set."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from reading import colour_of, config, numbered, numbers_of, read, refusal, write_rows

from mm_grpo.data.sources import load_train
from mm_grpo.run.inputs import inputs_of


def jsonl(path: Path, *numbers: int) -> Path:
    return write_rows(path, *numbered(*numbers))


def test_folders_of_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    for at, numbers in enumerate([(0, 1), (2,), (3, 4)]):
        path = tmp_path / "parquet" / f"train-{at:05d}-of-00003.parquet"
        path.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_list(numbered(*numbers)).to_parquet(str(path))
        jsonl(tmp_path / "lines" / f"rows-{at}.jsonl", *numbers)
    (tmp_path / "parquet" / "README.md").touch()
    (tmp_path / "parquet" / "dataset_infos.json").write_text("{}")
    assert numbers_of(tmp_path / "parquet") == numbers_of(tmp_path / "lines") == [0, 1, 2, 3, 4]
    rows = read(tmp_path / "lines")
    names = [rows.row_name(i).removeprefix(f"{tmp_path}/lines/") for i in (1, 2)]
    assert names == ["rows-0.jsonl:2", "rows-1.jsonl:1"]
    assert rows.columns == ("prompt", "n") and rows.in_memory
    assert read(tmp_path / "parquet").row_name(2).endswith("train-00001-of-00003.parquet row 0")
    with pytest.raises(IndexError):
        rows.sample(5)


def test_several_splits_are_read_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    jsonl(folder / "train-00000-of-00001.jsonl", 0)
    jsonl(folder / "test-00000-of-00001.jsonl", 1)
    assert numbers_of(f"{folder}:test") == [1]
    assert numbers_of([f"{folder}/train-*.jsonl", f"{folder}:test"]) == [0, 1]
    jsonl(tmp_path / "named" / "train.jsonl", 0)
    jsonl(tmp_path / "named" / "validation.jsonl", 1)
    assert numbers_of(f"{tmp_path}/named:train") == [0]


@pytest.mark.parametrize(
    ("files", "end", "words"),
    [
        (["train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"], "", ("several", "test, train", "SPLIT")),
        (["train.jsonl", "test.jsonl"], ":val", ("'val'", "'test.jsonl'", "'train.jsonl'")),
        (["a.jsonl", "b.csv"], "", ("several", ".csv, .jsonl")),
        (["train.jsonl"], "/trian.jsonl", ("trian.jsonl", "'train.jsonl'")),
    ],
)  # fmt: skip
def test_mixed_files_are_refused(files: list[str], end: str, words: tuple[str, ...], tmp_path: Path) -> None:
    for name in files:
        jsonl(tmp_path / "d" / name, 0)
    message = refusal(f"{tmp_path}/d{end}")
    assert message.startswith("train: ") and all(word in message for word in words), message


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["train-00000-of-00003", "train-00002-of-00003"], "train-00001-of-00003"),
        (["train-00001-of-00003", "train-00002-of-00003"], "train-00000-of-00003"),
        (["x_00000_of_00002"], "x_00001-of-00002"),
        (["00000-of-00002-0123456789abcdef"], "00001-of-00002"),
        (["train-00000-of-00002", "train-00001-of-00002", "train-00002-of-00003"], "set of "),
        (["train-00000-of-00002", "train-00001-of-00002", "train-00002-of-00002"], "train-00002-of-00002"),
        (["x-00000-of-00002", "x-00001-of-00002", "x-00001-of-00002-0123456789abcdef"], "x-00000-of-00002"),
    ],
)
def test_incomplete_shards_are_refused(names: list[str], word: str, suffix: str, tmp_path: Path) -> None:
    for name in names:
        path = jsonl(tmp_path / "d" / f"{name}.jsonl", 0)
        if suffix == ".parquet":
            datasets.Dataset.from_list(numbered(0)).to_parquet(str(path.with_suffix(suffix)))
        elif suffix == ".csv":
            path.with_suffix(suffix).write_text("prompt,n\n?,0\n")
        if suffix != ".jsonl":
            path.unlink()
    files = [str(path) for path in (tmp_path / "d").iterdir()]
    pattern = f"{tmp_path}/**/*-*{suffix}" if "-" in names[0] else f"{tmp_path}/d/*"
    for given in (f"{tmp_path}/d", pattern, files):
        message = refusal(given)
        assert message.startswith("train: ") and suffix in message and word in message, message


def test_complete_shards_and_similar_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jsonl(tmp_path / "a" / "x-00000-of-00002.jsonl", 0)
    jsonl(tmp_path / "b" / "x-00001-of-00002.jsonl", 1)
    for at in (1, 2):  # as safetensors counts
        for folder in "cd":
            jsonl(tmp_path / folder / f"x-0000{at}-of-00002.jsonl", at)
    jsonl(tmp_path / "e" / "photo-00001-of-me.jsonl", 3)
    jsonl(tmp_path / "e" / "day-3-of-7.jsonl", 4)
    assert numbers_of([f"{tmp_path}/a", f"{tmp_path}/b"]) == [0, 1]
    assert numbers_of([f"{tmp_path}/c", f"{tmp_path}/d/*", f"{tmp_path}/e"]) == [1, 2, 1, 2, 4, 3]
    assert not caplog.records
    twice = f"{tmp_path}/c/x-00001-of-00002.jsonl"
    assert twice in refusal([f"{tmp_path}/c", twice])
    assert numbers_of(twice) == [1] and "x-00000-of-00002.jsonl" in caplog.text  # a part on purpose


def test_globs_and_lists(tmp_path: Path) -> None:
    for at in (2, 0, 1):
        jsonl(tmp_path / f"part{at}" / "rows.jsonl", at)
    jsonl(tmp_path / "b[1].jsonl", 7)
    (tmp_path / "part0" / "up").symlink_to("..")  # a link that leads up ends, and each file is found once
    datasets.Dataset.from_list(numbered(8)).to_parquet(str(tmp_path / "c[1].parquet"))
    datasets.Dataset.from_list(numbered(9)).save_to_disk(str(tmp_path / "part9"))
    assert numbers_of(f"{tmp_path}/part*/rows.jsonl") == numbers_of(f"{tmp_path}/**/rows.jsonl") == [0, 1, 2]
    assert numbers_of([f"{tmp_path}/part2/*.jsonl", tmp_path / "part0"]) == [2, 0]
    names = ("b[1].jsonl", "c[1].parquet", "part?")
    assert numbers_of([f"{tmp_path}/{name}" for name in names]) == [7, 8, 9]
    made = config([f"{tmp_path}/part0", f"{tmp_path}/part1"], text_only=True)
    assert len(load_train(made)) == 2


def test_links_that_lead_up_are_followed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them made forty levels of twice as many folders each."""
    for name in ("a", "b", "b/c"):
        jsonl(tmp_path / name / "rows.jsonl", len(name))
        for link in ("up", "top"):
            (tmp_path / name / link).symlink_to(tmp_path)
    (tmp_path / "aa").symlink_to("b")
    listed = count()
    scandir = os.scandir

    def counted(path: Any) -> Any:
        assert next(listed) < 200
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    monkeypatch.chdir(tmp_path)
    for start in (f"{tmp_path}/", "./", ""):
        assert numbers_of(f"{start}**/rows.jsonl") == [1, 3, 1]
    assert numbers_of("**/c/*.jsonl") == [3]


def test_images_start_at_the_folder_of_their_own_file(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        write_rows(tmp_path / name / "rows.jsonl", {"prompt": "?", "image": "x.png"})
        Image.new("RGB", (2, 2), colour).save(tmp_path / name / "x.png")
    rows = read([tmp_path / "a", tmp_path / "b"])
    red, blue = (255, 0, 0), (0, 0, 255)
    assert [colour_of(rows.sample(i).images[0]) for i in (0, 1)] == [red, blue]
    assert [colour_of(rows.control("shuffled").sample(i).images[0]) for i in (0, 1)] == [blue, red]


def test_the_inputs_of_a_run_are_found_in_lists_and_globs(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "a.jsonl", 1)
    for train in (f"{tmp_path}/d/*.jsonl", [f"{tmp_path}/d/a.jsonl"], f"{tmp_path}/d:train"):
        wanted = f"{tmp_path}/d" if str(train).endswith(":train") else f"{tmp_path}/d/a.jsonl"
        assert inputs_of(config(train)) == [("data.train", wanted)]
