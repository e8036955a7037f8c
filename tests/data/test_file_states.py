"""Files that are cut, exchanged or removed while a run reads them, and files that stay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from reading import config, numbered, png, read, write_rows

from mm_grpo.data.dataset import Dataset
from mm_grpo.data.image_files import readable
from mm_grpo.data.images import BadMedia
from mm_grpo.data.mixture import Mixture
from mm_grpo.data.sources import load_train
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import DataError

CUT = """
import os, sys
from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_train
from mm_grpo.errors import DataError
rows = load_train(GRPOConfig.from_dict({"model": {"path": "m"}, "data": {"train": sys.argv[1], "text_only": True}}))
rows.sample(0), rows.sample(1999)
os.truncate(sys.argv[2], 0)
try:
    rows.opener(1000)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["saved", "arrow", "jsonl"])
def test_rows_whose_file_is_cut_end_in_one_message(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / f"rows.{kind}", [{"prompt": "?" * 500, "n": n} for n in range(2000)]
    if kind == "jsonl":
        write_rows(path, *rows)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        (file,) = (tmp_path / "saved").glob("*.arrow")
        path = tmp_path / "saved" if kind == "saved" else file.rename(path)
    script = f"import datasets; datasets.config.HF_DATASETS_CACHE = {str(tmp_path / 'cache')!r}\n" + CUT
    cut = path if kind == "jsonl" else next((tmp_path / "saved").glob("*.arrow"), None)
    if cut is None:  # of an Arrow file, the copy in the library's cache is mapped
        read(str(path), text_only=True)
        (cut,) = (tmp_path / "cache").rglob("*.arrow")
    command = [sys.executable, "-c", script, str(path), str(cut)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert str(cut) in ended.stdout and "--resume" in ended.stdout


def exchanged(path: Path) -> None:
    path.write_bytes(png("blue", (9, 9)))


def cut(path: Path) -> None:
    os.truncate(path, 40)


@pytest.mark.parametrize("change", [exchanged, lambda path: os.utime(path, ns=(1, 1)), cut, Path.unlink])
@pytest.mark.parametrize("form", ["path", "relative", "mapping", "url", "mixture", "head", "shuffled"])
def test_an_image_that_changes_later(tmp_path: Path, form: str, change: Callable[[Path], None]) -> None:
    paths = [tmp_path / f"{n}.png" for n in range(4)]
    for path, colour in zip(paths, ("red", "green", "white", "black"), strict=True):
        path.write_bytes(png(colour))
    source = {"relative": lambda p: p.name, "mapping": lambda p: {"path": str(p)}, "url": Path.as_uri}
    images = [source.get(form, str)(path) for path in paths]
    rows = [row | {"image": image} for row, image in zip(numbered(0, 1, 2, 3), images, strict=True)]
    given = Mixture([{"path": rows[:2]}, {"path": rows[2:]}]) if form == "mixture" else rows
    whole = readable(load(given, tmp_path), "drop", Ranks())
    forms = {"head": lambda: whole.head(3), "shuffled": lambda: whole.control("shuffled")}
    found = forms.get(form, lambda: whole)()
    change(paths[2])
    messages = []
    for index in range(len(found)):
        try:
            found.sample(index)
        except DataError as error:
            assert not isinstance(error, BadMedia)
            messages.append((str(error), found.row_name(index)))
    ((message, row_name),) = messages
    assert "2.png" in message and row_name in message and "--resume" in message


def load(rows: object, folder: Path) -> Dataset:
    return load_train(config(image_dir=str(folder)), rows)


def test_an_image_that_was_never_there_may_come(tmp_path: Path) -> None:
    rows = load([{"prompt": "?", "image": "0.png"}], tmp_path)
    with pytest.raises(BadMedia):
        rows.sample(0)
    (tmp_path / "0.png").write_bytes(png())
    assert len(rows.sample(0).images) == len(rows.sample(0).images) == 1
