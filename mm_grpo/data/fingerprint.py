"""Digests of rows, by which a resumed run notices that its data changed."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import xxhash
from PIL import Image

from mm_grpo.data.images import IMAGE, Files, Folder, SourceKind, read_encoded
from mm_grpo.data.rows import Fields
from mm_grpo.data.videos import VIDEO
from mm_grpo.errors import BadMedia

VIDEO_START = 2**16
"""Bytes at the start of a video that tell it from others, because reading all would take too long."""


def row_digest(fields: Fields, row_name: str, folder: Folder, files: Files) -> bytes:
    """Return the digest of a row with the encoded bytes of its images, and the first of its videos.

    Of a PIL image mode and size count, of a medium that cannot be read what the row has. DataError if a file changed.
    """

    def encoded(source: Any, kind: SourceKind, at_most: int) -> Any:
        with suppress(BadMedia):
            return read_encoded(source, row_name, folder, files, at_most, kind)[0]
        return source

    media = [encoded(image, IMAGE, -1) for image in fields.images]
    for video in fields.videos:
        media += [video.numbers, *(encoded(source, VIDEO, VIDEO_START) for source in video.sources)]
    # of the prompt's columns, messages and media say all
    return digest_of([fields.messages, media, fields.other_columns])


def digest_of(row: Any) -> bytes:
    """Return the XXH3 of a row as JSON, 8 bytes."""
    return xxhash.xxh3_64_digest(json.dumps(row, sort_keys=True, default=_stable_text).encode())


def _stable_text(value: Any) -> str:
    """Return a text for a value that JSON does not hold, the same at every reading of the row."""
    if isinstance(value, bytes):
        return xxhash.xxh3_128_hexdigest(value)
    if isinstance(value, Image.Image):
        return f"{value.mode} {value.size}"
    if hasattr(value, "tolist"):  # arrays
        return str(value.tolist())
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
