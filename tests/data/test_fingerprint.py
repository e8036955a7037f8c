"""What tells datasets apart, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from helpers import tiny
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.data import dataset as module
from mm_grpo.data.dataset import fingerprint
from mm_grpo.data.sources import load

SETTINGS = GRPOConfig.from_dict({"model": {"path": "x"}}).data


def of(rows: Any) -> dict[str, Any]:
    return fingerprint(load(rows, SETTINGS, "train"))


def row(**changes: Any) -> dict[str, Any]:
    return {"prompt": "what is it", "answer": "red", "boxes": np.array([1, 2]), "x": object(), **changes}


def test_equal_rows_have_one_fingerprint_however_they_were_made() -> None:
    assert of([row(), row(answer="blue")]) == of([row(), row(answer="blue")])
    assert of([row()])["rows"] == 1


@pytest.mark.parametrize(
    "other",
    [
        [row()],
        [row(), row(answer="green")],
        [row(answer="blue"), row()],
        [row(), row(answer="blue", prompt="what is that")],
        [row(), row(answer="blue", boxes=np.array([1, 3]))],
        [row(), row(answer="blue", image=tiny.picture(1))],
    ],
)
def test_others_have_another(other: list[dict[str, Any]]) -> None:
    assert of(other) != of([row(), row(answer="blue")])


def test_images_are_fingerprinted_by_where_they_come_from(tmp_path: Path) -> None:
    for name, size in (("a", 56), ("b", 84)):
        Image.new("RGB", (size, size)).save(tmp_path / f"{name}.png")
    paths = [of([row(image=str(tmp_path / f"{name}.png"))]) for name in "ab"]
    held = [of([row(image=(tmp_path / f"{name}.png").read_bytes())]) for name in "ab"]
    assert paths[0] != paths[1] and held[0] != held[1]


def test_a_file_and_a_dataset_of_it_are_read_the_same_twice(tmp_path: Path) -> None:
    rows = [{"prompt": "what", "answer": str(n)} for n in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert of(str(file)) == of(str(file)) == of(rows)
    table = datasets.Dataset.from_list([dict(r, image=tiny.picture(1)) for r in rows])
    assert of(table) == of(table) and of(table)["rows"] == 5


def test_of_many_rows_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FINGERPRINT_ROWS", 3)
    rows = [row(answer=str(n)) for n in range(7)]
    found = of(rows)
    for place, noticed in ((0, True), (1, False), (3, True), (6, True)):
        changed = [*rows[:place], row(answer="other"), *rows[place + 1 :]]
        assert (of(changed) != found) == noticed, place
