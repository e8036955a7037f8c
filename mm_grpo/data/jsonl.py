"""Rows as JSON files: a JSONL file with its images in a folder beside it, written and read; a JSON list, read.

Recipes use `write_jsonl` to bring a dataset of a hub onto the disk. Encoded images keep their bytes, so nothing
is compressed twice; equal images share one file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from mm_grpo.data.images import LEGAL_SOURCES
from mm_grpo.errors import DataError

IMAGE_COLUMNS = ("image", "images")
_BLANK = object()
_SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp", "TIFF": ".tif"}


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> int:
    """Write rows to `path`, one a line, and their images to `images/` beside it; returns the count of rows.

    In `image` and `images` a PIL image, bytes, and a mapping with `bytes` (as the datasets library gives
    with `decode=False`) become a path relative to the file; a path stays as it is. Every other value must be
    one that JSON knows. The file appears when it is whole: a run that is stopped leaves `path` as it was.

    Raises:
        DataError: there are no rows, or a value of one cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    count = 0
    with unfinished.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, start=1):
            stored = {name: _stored(name, value, path, count) for name, value in row.items()}
            try:
                file.write(json.dumps(stored, ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{path}: row {count} cannot be written ({error}); columns hold text, numbers, true, false, "
                    "null, and lists and mappings of those"
                ) from error
    if not count:
        unfinished.unlink()
        raise DataError(f"{path}: there are no rows to write")
    unfinished.replace(path)
    return count


def read_jsonl(path: Path) -> tuple[list[Any], list[int]]:
    """One row per line, and the number of each row's line, from 1; blank lines are skipped."""
    rows, lines = [], []
    with path.open("rb") as file:  # bytes: in text, a U+2028 inside a string would end the line
        for number, line in enumerate(file, start=1):
            row = _parse(line, f"{path}:{number}")
            if row is not _BLANK:
                rows.append(row)
                lines.append(number)
    _refuse_empty(rows, path)
    return rows, lines


def read_json(path: Path) -> list[Any]:
    """The rows of a JSON file that holds one list."""
    rows = _parse(path.read_bytes(), str(path))
    rows = [] if rows is _BLANK else rows
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: holds one {type(rows).__name__}; legal is a list of rows, or a .jsonl file of them"
        )
    _refuse_empty(rows, path)
    return rows


def _stored(name: str, value: Any, path: Path, row: int) -> Any:
    if name not in IMAGE_COLUMNS or value is None:
        return value
    if isinstance(value, list | tuple):
        return [_image(one, path, row) for one in value]
    return _image(value, path, row)


def _image(source: Any, path: Path, row: int) -> str:
    """The path of an image relative to the file's folder, after writing its bytes there."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    from PIL import Image, UnidentifiedImageError

    if not isinstance(source, bytes | Image.Image):
        raise DataError(
            f"{path}: row {row} has an image that is a {type(source).__name__}; legal is {LEGAL_SOURCES}"
        )
    try:
        if isinstance(source, Image.Image):
            buffer = BytesIO()
            source.save(buffer, format="PNG")
            source = buffer.getvalue()
        with Image.open(BytesIO(source)) as opened:
            suffix = _SUFFIXES.get(opened.format or "", ".img")
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(
            f"{path}: row {row} has an image that cannot be read or written as PNG ({error})"
        ) from error
    file = path.parent / "images" / f"{hashlib.sha256(source).hexdigest()[:24]}{suffix}"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(source)
    return f"images/{file.name}"


def _parse(data: bytes, where: str) -> Any:
    try:
        text = data.decode("utf-8-sig")
        if not text.strip():
            return _BLANK
        return json.loads(text, parse_constant=_not_finite, parse_float=_finite, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 (at byte {error.start}); save it as UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        remedy = "mend or remove it"
        if error.msg == "Extra data" and where.endswith(".json"):
            remedy = "if it holds one row a line, call it .jsonl"
        raise DataError(f"{where}: is not valid JSON ({error.msg} at {place}); {remedy}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # thousands of digits, or of lists in lists; what the hooks raise
        raise DataError(f"{where}: cannot be read ({error}); mend or remove it") from error


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON, and no reward can score by it; write null")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def _refuse_empty(rows: list[Any], path: Path) -> None:
    if not rows:
        raise DataError(f"{path}: is empty; it needs at least 1 row")
