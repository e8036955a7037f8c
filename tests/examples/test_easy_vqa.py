"""prepare.py of the recipe easy_vqa, on wheels of our own making."""

from __future__ import annotations

import json
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.recipe_scripts import EXAMPLES, script

from mm_grpo.config import GRPOConfig
from mm_grpo.data import load
from mm_grpo.errors import DataError

FIXTURE = EXAMPLES / "easy_vqa" / "fixture"
ROWS = [json.loads(line) for line in (FIXTURE / "published.jsonl").read_text().splitlines()]
QUESTIONS = [[row["question"], row["answer"], number] for number, row in enumerate(ROWS)]
PICTURES = {f"{number}.png": (FIXTURE / row["image"]).read_bytes() for number, row in enumerate(ROWS)}


def files(questions: Sequence[Any] = QUESTIONS, pictures: Mapping[str, bytes] = PICTURES) -> dict[str, bytes]:
    """Return the files of the published package by name; both splits have the same rows."""
    splits = [f"easy_vqa/data/{split}" for split in ("train", "test")]
    listed = {f"{split}/questions.json": json.dumps(questions).encode() for split in splits}
    return listed | {f"{split}/images/{name}": data for split in splits for name, data in pictures.items()}


def wheel(path: Path, content: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def test_prepare_reads_the_wheel_and_writes_what_the_config_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = {"../evil.png": b"", "/evil.png": b"", "easy_vqa/data/train/images/../../../../evil.png": b""}
    file = wheel(tmp_path / "easy.whl", files() | outside)
    monkeypatch.chdir(tmp_path)
    script("easy_vqa/prepare.py").main(["--wheel", str(file), "--eval-rows", "3"])
    config = GRPOConfig.from_yaml("easy_vqa")
    train = load(config.data.train, config.data)
    (heldout,) = (load(source, config.data) for source in config.data.eval_sets().values())
    assert [train.sample(i).columns["answer"] for i in range(len(train))] == [row["answer"] for row in ROWS]
    assert [heldout.sample(i).columns["answer"] for i in range(3)] == [ROWS[i]["answer"] for i in (0, 2, 4)]
    assert len(heldout) == 3 and all(train.sample(i).images for i in range(len(train)))
    written = {path.read_bytes() for path in tmp_path.rglob("*.png")}
    assert written == set(PICTURES.values())


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (files([["what?", "red", "../../../../secret"]]), "questions.json, row 0"),
        (files([["what?", "red", True]]), "questions.json, row 0"),
        (files([["what?", "red"]]), "questions.json, row 0"),
        (files([["what?", "red", 9]]), "images/9.png"),
        (files({"what?": "red"}), "questions.json, row 0"),
        ({}, "questions.json"),
    ],
)
def test_a_damaged_wheel_is_refused_with_the_place(
    content: Mapping[str, bytes], place: str, tmp_path: Path
) -> None:
    prepare = script("easy_vqa/prepare.py")
    read = prepare.reader(wheel(tmp_path / "easy.whl", content))
    with pytest.raises(DataError, match=place):
        list(prepare.questions(read, "train"))


def test_a_link_in_a_wheel_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("easy_vqa/data/train/images/0.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    content = files()
    del content[link.filename]
    with zipfile.ZipFile(wheel(tmp_path / "easy.whl", content), "a") as archive:
        archive.writestr(link, "/etc/hostname")
    prepare = script("easy_vqa/prepare.py")
    with pytest.raises(DataError, match=r"images/0\.png"):
        list(prepare.questions(prepare.reader(tmp_path / "easy.whl"), "train"))


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("no archive")
    for name in ("text.whl", "missing.whl"):
        with pytest.raises(DataError, match=name):
            script("easy_vqa/prepare.py").reader(tmp_path / name)


def test_without_a_wheel_the_installed_package_is_read_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = script("easy_vqa/prepare.py")
    with pytest.raises(DataError, match=r"pip download easy-vqa --no-deps.*--wheel"):
        prepare.reader(None)
    for name, data in (files() | {"easy_vqa/__init__.py": b"raise AssertionError"}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    monkeypatch.syspath_prepend(tmp_path)
    assert [row["answer"] for row in prepare.questions(prepare.reader(None), "test")] == [
        row["answer"] for row in ROWS
    ]
