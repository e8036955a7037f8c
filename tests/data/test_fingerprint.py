"""What tells datasets apart, and what does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny
from PIL import Image
from reading import read

from mm_grpo.data import dataset as module


def of(rows: Any) -> dict[str, Any]:
    return read(rows).fingerprint()


def row(**changes: Any) -> dict[str, Any]:
    return {"prompt": "what is it", "answer": "red", "boxes": np.array([1, 2]), "x": object(), **changes}


@pytest.mark.parametrize(
    "other",
    [
        [row(), row(answer="green")],
        [row(), row(answer="blue", prompt="what is that")],
        [row(), row(answer="blue", image=tiny.picture(1))],
    ],
)
def test_others_have_another(other: list[dict[str, Any]]) -> None:
    assert of(other) != of([row(), row(answer="blue")])


@pytest.mark.parametrize("held", [str, lambda path: {"path": str(path), "bytes": None}, Path.read_bytes])
def test_fingerprints_hash_the_contents_of_images(held: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "a.bmp"  # of one size, whatever it shows

    def with_picture(colour: str, time: int) -> dict[str, Any]:
        Image.new("RGB", (56, 56), colour).save(file)
        os.utime(file, (time, time))
        return of([row(image=held(file)), row()])

    found = with_picture("red", 1)
    assert with_picture("red", 2) == found, "a copy, whose time is another"
    assert with_picture("blue", 1) != found, "exchanged behind its path"
    file.unlink()
    assert held is Path.read_bytes or of([row(image=held(file)), row()]) != found, "gone"


def test_some_of_many_rows_are_read_with_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All rows in memory are compared, and their image files for rows 0, 3 and 6 of 7."""
    monkeypatch.setattr(module, "SAMPLED_ROWS", 3)
    for n in range(8):
        tiny.picture(n).save(tmp_path / f"{n}.png")
    rows = [row(answer=str(n), image=str(tmp_path / f"{n}.png")) for n in range(7)]
    digests = of(rows)["digests"]
    for place in range(7):
        assert of([*rows[:place], row(answer="other"), *rows[place + 1 :]])["digests"] != digests, place
        file = tmp_path / f"{place}.png"
        kept = file.read_bytes()
        file.write_bytes((tmp_path / "7.png").read_bytes())
        assert (of(rows)["digests"] != digests) == (place in (0, 3, 6)), place
        file.write_bytes(kept)
