"""Writing rows down: a JSONL file, and the images of its rows in a folder beside it.

What `write_jsonl` writes, `load` reads. Encoded images keep their bytes, so nothing is compressed twice;
equal images share one file. Recipes use it to bring a dataset of a hub onto the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from mm_grpo.data.images import LEGAL_SOURCES
from mm_grpo.errors import DataError

IMAGE_COLUMNS = ("image", "images")
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
    place = path.parent / "images" / f"{hashlib.sha256(source).hexdigest()[:24]}{suffix}"
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(source)
    return f"images/{place.name}"
