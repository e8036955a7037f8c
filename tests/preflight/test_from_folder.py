"""`mm-grpo init DIR --from FOLDER|FILE`: folders as people have them, and what is refused."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers import tiny

from mm_grpo.config import GRPOConfig

LONG = "a long caption of the picture that is called"
CLASSES = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]


def pictures(folder: Path, *names: str) -> None:
    """Different pictures under these names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if name.lower().endswith("png") else "JPEG"
        tiny.picture(sum(map(ord, name)), 100, 60).save(folder / name, kind)


def write(file: Path, content: Any) -> None:
    """A text, or JSON, of a list under .jsonl one entry a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in content] if file.suffix == ".jsonl" else [json.dumps(content)]
    file.write_text(content if isinstance(content, str) else "".join(lines), encoding="utf-8")


def semicolons(folder: Path) -> None:
    pictures(folder / "Bilder", *(f"Größe {i}.PNG" for i in range(6)))
    rows = "".join(f"Größe {i}.PNG;How many in {i}?;{i}\n" for i in range(6))
    write(folder / "Daten.csv", "\ufeffDatei;Question;Count\n" + rows + "gone.png;How many?;3\n")


def kaggle(folder: Path) -> None:
    pictures(folder, *(f"train/{i}.jpg" for i in range(6)), "test/9.jpg")
    write(folder / "train.csv", "id,breed\n" + "".join(f"{i},{'ab'[i % 2]} dog\n" for i in range(6)))
    write(folder / "test.csv", "id\n9\n")


def classes(folder: Path) -> None:
    places = ("train/cat", "train/{dog}", "val/cat", "val/{dog}", "test/cat", "test/{dog}")
    pictures(folder, *(f"{place}/{i}.jpg" for i, place in enumerate((*places, *places[:2]))))
    write(folder / "train/cat/broken.jpg", "no picture")
    write(folder / "train/cat/clip.mp4", "a video")
    os.link(folder / "val/cat/2.jpg", folder / "train/cat/same.jpg")


def imagefolder(folder: Path) -> None:
    for split, numbers in (("train", range(4)), ("test", range(4, 6))):
        pictures(folder / split, *(f"{i}.jpg" for i in numbers))
        rows = [{"file_name": f"{i}.jpg", "text": f"{LONG} {i}"} for i in numbers]
        write(folder / split / "metadata.jsonl", rows)


def chats(folder: Path) -> None:
    pictures(folder / "images", *(f"{i}.png" for i in range(4)))
    ask = {"from": "human", "value": "<image>\nWhich?"}
    talks = [[ask, {"from": "gpt", "value": colour}] for colour in ("red", "red", "red", "blue")]
    write(
        folder / "chat.json", [{"image": f"images/{i}.png", "conversations": t} for i, t in enumerate(talks)]
    )


def coco(folder: Path) -> None:
    pictures(folder / "val2017", *(f"00{i}.jpg" for i in range(4)))
    widths = (100, 100, 100, 50)  # the boxes of the last are of a smaller picture
    images = [{"id": i, "file_name": f"00{i}.jpg", "width": w, "height": 60} for i, w in enumerate(widths)]
    marks = [
        {"image_id": i, "category_id": 1 + (at > 0), "bbox": [at, 5, 20, 30], "iscrowd": int(i == 2)}
        for i in range(4)
        for at in range(3)
    ]
    content = {"images": images, "categories": CLASSES, "annotations": marks}
    write(folder / "annotations/instances_val2017.json", content)


def captions(folder: Path) -> None:
    for i in range(4):
        pictures(folder, f"{i}.jpg")
        write(folder / f"{i}.txt", f"{LONG} {i}\n")


def parquet(folder: Path) -> None:
    pictures(folder.parent, *(f"{i}.png" for i in range(6)))
    rows = [{"image": {"bytes": (folder.parent / f"{i}.png").read_bytes()}, "label": i % 2} for i in range(6)]
    label = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    folder.mkdir()
    datasets.Dataset.from_list(rows, features=features).to_parquet(folder / "train-00000-of-00001.parquet")


def choices(folder: Path) -> None:
    pictures(folder, *(f"{i}.png" for i in range(4)))
    splits = ("test", "train", "train", "train")
    rows = [f"{i}.png\tWhich {i}?\tred\tblue\t{'AB'[i % 2]}\t{split}\n" for i, split in enumerate(splits)]
    text = "".join(rows).replace("0.png", base64.b64encode((folder / "0.png").read_bytes()).decode())
    write(folder / "rows.tsv", "image\tquestion\tA\tB\tanswer\tsplit\n" + text)


FOLDERS = [
    (semicolons, ["count"], {"train": 5, "val": 1}, {"prompt": "How many in 3?", "image": "Bilder/Größe 3.PNG"}),
    (kaggle, ["exact_match"], {"train": 5, "val": 1}, {"image": "train/3.jpg", "answer": "b dog"}),
    (classes, ["exact_match"], {"train": 4, "val": 2, "test": 2}, {"image": "val/cat/2.jpg", "answer": "cat"}),
    (imagefolder, ["word_f1"], {"train": 4, "test": 2}, {"image": "test/4.jpg", "answer": f"{LONG} 4"}),
    (chats, ["exact_match"], {"train": 3, "val": 1}, {"image": "images/3.png", "answer": "blue"}),
    (coco, ["iou", "count"], {"train": 2, "val": 2}, {"image": "val2017/001.jpg", "box": [0, 5, 20, 30]}),
    (captions, ["word_f1"], {"train": 3, "val": 1}, {"image": "2.jpg", "answer": f"{LONG} 2"}),
    (parquet, ["exact_match"], {"train": 5, "val": 1}, {"answer": "dog"}),
    (choices, ["choice"], {"train": 3, "test": 1}, {"prompt": "Which 3?\nA. red\nB. blue", "answer": "B"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fill", "rewards", "sizes", "row"), FOLDERS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_folder_becomes_rows_that_pass_check(
    fill: Any, rewards: Any, sizes: Any, row: Any, tmp_path: Path, command: Any, models: Any, monkeypatch: Any
) -> None:
    source, target = tmp_path / "source", tmp_path / "made"
    fill(source)
    files = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    done = command("init", target, "--from", source)
    assert done.code == 0, done.err
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == files
    sets = {p.stem: [*map(json.loads, p.read_text().splitlines())] for p in target.glob("*.jsonl")}
    assert {name: len(rows) for name, rows in sets.items()} == sizes
    assert any(row.items() <= other.items() for rows in sets.values() for other in rows), sets
    shown = [{row["image"] for row in rows} for rows in sets.values()]
    assert len(set().union(*shown)) == sum(map(len, shown))
    monkeypatch.chdir(tmp_path.parent)  # the config is good from any folder
    config = GRPOConfig.from_yaml(target / "config.yaml")
    names = (str(r["name"] if isinstance(r, dict) else r) for r in config.rewards)
    assert [name.rpartition(":")[2] for name in names] == rewards
    assert config.rollout.prompts_per_step <= len(sets["train"])
    if fill is classes:
        assert config.data.prompt_template == "{prompt} Answer with one of: cat, {{dog}}."
        assert "broken.jpg" in done.out and "pictures of two sets" in done.out
    checked = command("check", target / "config.yaml", f"model.path={models['qwen2_5_vl']}")
    assert checked.code == 0 and checked.out.rstrip().endswith("ok"), checked.out


TABLES: list[tuple[str, Any, dict[str, Any] | None]] = [  # name, content, columns of the row of 3.png; None: refused
    ("l.csv", "label,filename\n" + "".join(f"{i % 2},{i}.png\n" for i in range(4)), {"answer": "1"}),
    ("q.csv", "img,frage,antwort\n" + "".join(f"{i}.png,Was?,{i}\n" for i in range(4)), None),
    ("m.csv", "img,mask,seen\n" + "".join(f"{i}.png,m{i}.png,dog\n" for i in range(4)), {"answer": "dog"}),
    ("u.csv", ",img,seen\n" + "".join(f"{i},{i}.png,dog\n" for i in range(4)), {"answer": "dog"}),
    ("b.jsonl", lambda i: {"question": "Where?", "bbox": [1, 2, 30, 40]}, None),
    ("o.jsonl", lambda i: {"question": "?", "choices": ["a", "b", "c", "d"], "answer": i},
     {"prompt": "?\nA. a\nB. b\nC. c\nD. d", "answer": "D"}),
    ("c.jsonl", lambda i: {"q": "?", "option_a": "red", "option_b": "blue", "answer": "ab"[i % 2]}, {"answer": "B"}),
    ("s.jsonl", lambda i: {"question": "?", "options": "['1', '3']", "answer": "31"[i % 2]}, {"answer": "A"}),
    ("p.jsonl", lambda i: {"question": "?", "options": ["a", "b"], "answer": 1 + i % 2}, None),  # they count from 1
    ("k.jsonl", lambda i: {"question": "?", "answer": [[1, 2, 30, 40 + i], {"text": "a"}][i % 2]}, None),
    ("g.jsonl", lambda i: {"question": "?", "solution": f"<think>4?</think><answer>{i}</answer>"}, {"answer": "3"}),
    ("d.jsonl", lambda i: {"date": f"2024-02-0{i}"}, {"answer": "2024-02-03"}),
    ("coco.json", {"images": [{"id": i, "file_name": f"{i}.png"} for i in range(4)], "categories": CLASSES,
                   "annotations": [{"image_id": i, "category_id": 1, "bbox": [i, 5, 20, 30]} for i in range(4)]},
     {"box": [3, 5, 20, 30]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "row"), TABLES, ids=[name for name, *_ in TABLES])
def test_columns_of_a_table(name: str, content: Any, row: Any, tmp_path: Path, command: Any) -> None:
    pictures(tmp_path, *(f"{i}.png" for i in range(4)), *(f"m{i}.png" for i in range(4)))
    content = [{"image": f"{i}.png", **content(i)} for i in range(4)] if callable(content) else content
    write(tmp_path / name, content)
    if name == "l.csv":
        write(tmp_path / "sample_submission.csv", "image,label\n0.png,0\n1.png,0\n")
    target = tmp_path / "made"
    done = command("init", target, "--from", tmp_path)
    assert done.code == (2 if row is None else 0), done.err
    if row is None:
        assert "answer" in done.err and not target.exists()
        return
    rows = [json.loads(line) for file in target.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(rows) == 4 and row.items() <= next(r for r in rows if r["image"] == "3.png").items(), rows


def test_what_is_left_out_is_named(tmp_path: Path, command: Any) -> None:
    pictures(tmp_path, "near.png")  # of another dataset
    source = tmp_path / "source"
    pictures(source, *(f"{place}/{i}.png" for place in ("train", "val") for i in range(4)), "train/5.png")
    os.rename(source / "train/1.png", os.fsencode(source / "train") + b"/\xf6.png")
    names = ("/data/train/0", "train/2", "val/0", "val/5", "near", "train/\udcf6")
    write(source / "rows.jsonl", [{"image": f"{name}.png", "answer": "a", "why": "so"} for name in names])
    write(source / "notes.xml", "<annotations/>")
    out = command("init", tmp_path / "made", "--from", source).out
    named = ("2 in train", "1 in val", "val/5", "\\udcf6", "'why'", "'notes.xml'")
    assert all(word in out for word in named), out


def test_what_is_not_understood_is_one_message(tmp_path: Path, command: Any) -> None:
    folders = ("two", "plain", "yolo", "pairs/masks", "pairs/x")
    pictures(tmp_path, "one/cat/1.png", *(f"{folder}/{i}.png" for folder in folders for i in "12"))
    for name in ("two/a.csv", "two/b.csv"):
        write(tmp_path / name, "image,label\n1.png,cat\n2.png,dog\n")
    write(tmp_path / "plain/rows.csv", "1.png,cat\n2.png,dog\n")
    write(tmp_path / "yolo/1.txt", "0 0.5 0.5 0.1 0.1\n")
    write(tmp_path / "zip/a.zip", "PK")
    write(tmp_path / "voc/1.xml", "<annotation>\n<object/>")
    (tmp_path / "empty").mkdir()
    words = {"one": "1 .png", "two": "'a.csv', 'b.csv'", "plain": "first line", "yolo": "YOLO", "voc": "VOC"}
    words |= {"pairs": "masks", "zip/a.zip": "Unpack", "empty": "no files", "nothing": "no folder"}
    for name, word in words.items():
        done = command("init", tmp_path / "made", "--from", tmp_path / name)
        assert done.code == 2 and word in done.err and done.err.count("\n") == 1, done.err
    for name in ("owner/name", ""):
        assert "data.train" in command("init", tmp_path / "made", "--from", name).err
    assert not (tmp_path / "made").exists()


def test_links_and_folders_inside_one_another(tmp_path: Path, command: Any, models: Any) -> None:
    source = tmp_path / "source"
    pictures(tmp_path / "away", *(f"{name}/{i}.png" for name in ("x", "yy") for i in range(4)))
    os.link(tmp_path / "away/x/0.png", tmp_path / "away/yy/copy.png")  # a picture of two classes
    source.mkdir()
    for name, target in (("cat", tmp_path / "away/x"), ("dog", tmp_path / "away/yy"), ("loop", source)):
        (source / name).symlink_to(target)
    for target in (source / "inside", source):
        done = command("init", target, "--from", source)
        assert done.code == 0 and "several labels" in done.out and "6 in train.jsonl" in done.out, done.out
        assert command("check", target / "config.yaml", f"model.path={models['qwen2_5_vl']}").code == 0
    again = command("init", source, "--from", source)
    assert again.code == 2 and "config.yaml and 2 more would be" in again.err


def test_questions_that_say_how_to_answer_get_no_second_form(tmp_path: Path, command: Any) -> None:
    assert command("init", tmp_path / "first").code == 0  # its question ends with "Answer with a number."
    assert command("init", tmp_path / "made", "--from", tmp_path / "first").code == 0
    assert GRPOConfig.from_yaml(tmp_path / "made/config.yaml").data.prompt_template is None
