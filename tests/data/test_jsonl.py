"""Rows written to a file read back as the same rows, and their images keep their bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import tiny
from PIL import Image
from reading import encoded

from mm_grpo.config import DataConfig
from mm_grpo.data import load, write_jsonl
from mm_grpo.errors import DataError


def test_every_kind_of_image_is_written_and_read_back(tmp_path: Path) -> None:
    jpeg = encoded(tiny.picture(3), "JPEG")
    rows = [
        {"prompt": "é?", "image": tiny.picture(1), "answer": 3},
        {"prompt": "b", "image": {"bytes": jpeg, "path": "of/the/hub.jpg", "width": 5}, "answer": None},
        {"prompt": "c", "images": [tiny.picture(1), jpeg], "answer": [1.5, "x"]},
        {"prompt": "d", "image": "elsewhere.png", "answer": ""},
    ]
    assert write_jsonl(rows, tmp_path / "out" / "rows.jsonl") == 4
    stored = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in stored] == [3, None, [1.5, "x"], ""]
    assert stored[0]["prompt"] == "é?" and stored[3]["image"] == "elsewhere.png"
    assert stored[0]["image"].startswith("images/") and stored[0]["image"].endswith(".png")
    assert stored[1]["image"].endswith(".jpg")
    assert stored[2]["images"] == [stored[0]["image"], stored[1]["image"]]  # equal images share a file
    assert (tmp_path / "out" / stored[1]["image"]).read_bytes() == jpeg  # not compressed a second time
    tiny.picture(2).save(tmp_path / "out" / "elsewhere.png")
    dataset = load(str(tmp_path / "out" / "rows.jsonl"), DataConfig())
    assert dataset.sample(0).images[0].tobytes() == tiny.picture(1).tobytes()
    assert dataset.sample(2).other_columns == {"answer": [1.5, "x"]}


def test_frames_of_videos_are_written_and_a_file_stays(tmp_path: Path) -> None:
    frames = tiny.video(1, 3).frames
    rows = [
        {"prompt": "a", "videos": [{"video": frames, "fps": 1.5}, "b.mp4"], "image": frames[1]},
        {"prompt": "b", "video": list(frames[1:])},
    ]
    write_jsonl(rows, tmp_path / "rows.jsonl")
    dataset = load(str(tmp_path / "rows.jsonl"), DataConfig())
    (first, whole), (image,) = dataset.fields(0).videos, dataset.fields(0).images
    (second,) = dataset.fields(1).videos
    assert (first.fps, whole.source, second.fps) == (1.5, "b.mp4", None)
    assert first.source[1:] == second.source and first.source[1] == image
    pixels = [Image.open(tmp_path / name).tobytes() for name in first.source]
    assert pixels == [frame.tobytes() for frame in frames]


def test_what_cannot_be_written_names_the_row_and_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl([{"prompt": "a"}], path)
    for rows, words in (
        ([{"prompt": "a"}, {"prompt": "b", "answer": {1, 2}}], "row 2 cannot be written"),
        ([{"prompt": "a", "answer": float("nan")}], "row 1 cannot be written"),
        ([{"prompt": "a", "image": b"no image"}], "row 1 cannot be written"),
        ([{"prompt": "a", "image": 3}], "row 1 cannot be written"),
        ([], "there are no rows to write"),
    ):
        with pytest.raises(DataError, match=words) as error:
            write_jsonl(rows, path)
        assert path.read_text() == '{"prompt": "a"}\n' and "{}" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ('{"prompt": "?", "n": 1, "n" : 2}', "'n'"),
        ('{"prompt": "?", "meta": {"of": [{"x": 1, "y": 0, "x": 1}]}}', "'x'"),
        ('{"prompt": "a", "\\u0070rompt": "b"}', "'prompt'"),
        ('{"prompt": "?", "n": [0, -1e400]}', "-1e400"),
        ('{"prompt": "?", "n": 1' + "0" * 400 + ".0}", "1.8e308"),
        ('{"prompt": "?", "n": -Infinity}', "-Infinity"),
        ('{"prompt": "?", "n": NaN}', "NaN"),
    ],
)
def test_what_json_would_lose_in_reading_is_refused(row: str, word: str, tmp_path: Path) -> None:
    sound = '{"prompt": "\\": 1e999, {}", "n": 1e308, "of": [{"n": 1}, {"n": 2}]}'
    for name, text, line in (
        ("rows.jsonl", f"{sound}\n\n{row}\n{sound}\n", 3),
        ("rows.json", f"[\n {sound},\n {row},\n {sound}\n]", 3),
        ("object.json", f'{{"rows": [{sound},\n{row}\n]}}', 2),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError) as refused:
            load(str(tmp_path / name), DataConfig())
        assert str(refused.value).startswith(f"{tmp_path / name}:{line}: "), refused.value
        assert word in str(refused.value) and len(str(refused.value)) < 400
    (tmp_path / "rows.json").write_text(f"[{sound}]")
    assert load(str(tmp_path / "rows.json"), DataConfig()).fields(0).columns["n"] == 1e308
