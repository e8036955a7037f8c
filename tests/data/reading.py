"""Small sets of rows, and how tests of this folder read them."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.rows import Fields, read_row
from mm_grpo.data.sources import load, load_train
from mm_grpo.errors import DataError

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def config(train: Any = None, **data: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": {"path": "m"}, "data": {"train": train, **data}})


def read(source: Any, **data: Any) -> Rows:
    return load(source, config(**data).data)


def refusal(source: Any, **data: Any) -> str:
    """The one line of which reading the source ends; `rows_refusal` is the same of training rows, read and checked."""
    with pytest.raises(DataError) as caught:
        read(source, **data)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rows_refusal(rows: Any, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_train(config(**data), rows)
    return str(caught.value)


def fields_of(row: dict[str, Any], **options: Any) -> Fields:
    return read_row(row, row_name="row 3", **options)


def fields_refusal(row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError, match=r"^row 3: ") as caught:
        fields_of(row, **options)
    return str(caught.value)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def numbered(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": "?", "n": n} for n in numbers]


def numbers_of(source: Any) -> list[Any]:
    rows = read(source)
    return [rows.fields(i).columns["n"] for i in range(len(rows))]


def write_rows(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(colour: str = "red", size: tuple[int, int] = (2, 2)) -> bytes:
    return encoded(Image.new("RGB", size, colour))


def colour_of(image: Image.Image) -> Any:
    return image.getpixel((0, 0))
