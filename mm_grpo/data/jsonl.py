"""Rows as JSON files: a JSONL file with its images in a folder beside it, written and read; other JSON, read.

Recipes write a dataset of the hub to disk with `write_jsonl`. Encoded images keep their bytes, so nothing is compressed
twice; equal images share one file. JSON is not read by the datasets library: here messages name the line, a missing key
is not a null, and the common case need not wait for the library's import.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import zlib
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from mm_grpo.data.columns import brief
from mm_grpo.data.file_states import changed
from mm_grpo.data.images import IMAGE
from mm_grpo.errors import DataError
from mm_grpo.messages import MEDIA_TYPES

_BLANK = object()


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> int:
    """Write rows to `path`, one a line, and their images to `images/` beside it; returns the count of rows.

    In `image` and `images`, and of the frames in `video` and `videos`, a PIL image, bytes, and a mapping with `bytes`
    (from the datasets library with `decode=False`) become a path relative to the file; a path stays as it is. All other
    values must be JSON values. The file appears when it is complete: a run that is stopped leaves `path` as it was.

    Raises:
        DataError: there are no rows, or a value of one cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    count = 0
    with unfinished.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, start=1):
            try:
                stored = {name: _jsonable(name, value, path.parent) for name, value in row.items()}
                file.write(json.dumps(stored, ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError, OSError) as error:
                raise DataError(
                    f"{path}: row {count} cannot be written ({error}); columns hold text, numbers, true, false, null, "
                    f"and lists and mappings of those, and an image is {IMAGE.legal}"
                ) from None
    if not count:
        unfinished.unlink()
        raise DataError(f"{path}: there are no rows to write")
    unfinished.replace(path)
    return count


class JsonLines:
    """Rows of a JSONL file, which stay on disk: a line is read again when its row is asked for.

    Blank lines are no rows. The file is parsed once at construction, and a checksum of each line is kept.

    Raises:
        DataError: a line is not JSON, or there is no row.
    """

    in_memory = True
    """All rows can be looked at: a line is read in microseconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")  # bytes: in text, a U+2028 inside a string would end the line
        self._starts, self._sizes = array("Q"), array("Q")
        self._lines, self._sums = array("Q"), array("Q")
        names: dict[Any, None] = {}
        start = 0
        for number, line in enumerate(self._file, start=1):
            row = parse_json(line, f"{path}:{number}")
            if row is not _BLANK:
                self._starts.append(start)
                self._sizes.append(len(line))
                self._lines.append(number)
                self._sums.append(zlib.crc32(line))
                names.update(dict.fromkeys(row) if isinstance(row, dict) else {})
            start += len(line)
        if not self._starts:
            raise DataError(f"{path}: is empty; it needs at least 1 row")
        self.column_names = list(names)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> Any:
        # not seek and read: processes that were forked share the position in the file
        line = os.pread(self._file.fileno(), self._sizes[index], self._starts[index])
        if zlib.crc32(line) != self._sums[index]:
            raise changed(f"{self.row_name(index)}: the file")
        return parse_json(line, self.row_name(index))

    def row_name(self, index: int) -> str:
        """Return the file and the row's line, from 1, as an editor counts."""
        return f"{self._path}:{self._lines[index]}"


def read_json(path: Path) -> list[Any]:
    """Read the rows of a JSON file: a list, or an object with exactly one list of objects."""
    content = parse_json(path.read_bytes(), str(path), "correct it; a file with a row a line is .jsonl")
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        raise DataError(f"{path}: is a COCO file; join it into rows, as docs/data.md says under COCO")
    values = content.values() if isinstance(content, dict) else [content]
    lists = [value for value in values if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) != 1:
        raise DataError(
            f"{path}: is no list of rows, nor an object with one such list; a file of one row a line is called .jsonl"
        )
    return lists[0]


def parse_json(data: bytes, where: str, remedy: str = "correct or remove it") -> Any:
    """Parse JSON; return `_BLANK` for a blank text. DataError, which begins with `where`, if it is not valid."""
    try:
        text = data.decode("utf-8-sig")
        return _DECODER.decode(text) if text.strip() else _BLANK
    except _UnsafeValue as error:
        lines = text.splitlines(keepends=True)
        line = bisect.bisect(range(len(lines)), 0, key=lambda last: _is_refused("".join(lines[: last + 1])))
        at = f":{line + 1}" if len(lines) > 1 else ""
        raise DataError(f"{where}{at}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not valid JSON in UTF-8 ({error}); {remedy}") from None


class _UnsafeValue(ValueError):
    """A value that Python would read from JSON as another one than the file says."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(row := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in keys if keys.count(key) > 1)
        raise _UnsafeValue(f"the key {brief(key)} stands twice in one object; leave one of them")
    return row


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise _UnsafeValue(f"the number {brief(text)} is too large; write one below 1.8e308, or null")
    return number


def _refuse(name: str) -> NoReturn:
    raise _UnsafeValue(f"{name} is no number of JSON, and no reward can score by it; write null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)


def _is_refused(text: str) -> bool:
    """Return True if the beginning of a text already holds an unsafe value."""
    with suppress(json.JSONDecodeError):
        try:
            _DECODER.decode(text)
        except _UnsafeValue:
            return True
    return False


def _jsonable(name: str, value: Any, folder: Path) -> Any:
    if name.removesuffix("s") not in MEDIA_TYPES or value is None:
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(name, entry, folder) for entry in value]
    if isinstance(value, Mapping) and "video" in value:
        return {**value, "video": _jsonable(name, value["video"], folder)}
    return store_image(value, folder)


def store_image(source: Any, folder: Path) -> str:
    """Write an image's bytes into the folder; return its relative path. A path stays as it is."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    from PIL import Image

    if isinstance(source, Image.Image):
        buffer = BytesIO()
        source.save(buffer, format="PNG")
        source = buffer.getvalue()
    with Image.open(BytesIO(source)) as opened:
        suffix = {"JPEG": "jpg", "TIFF": "tif"}.get(str(opened.format), str(opened.format).lower())
    file = folder / "images" / f"{hashlib.sha256(source).hexdigest()[:24]}.{suffix}"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source)
    return f"images/{file.name}"
