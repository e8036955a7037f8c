"""Images that a row has and nothing reads: columns that look like images, and placeholders in texts.

A column looks like images by its values (a PIL image, encoded bytes, the mapping of datasets.Image, a path or an
address that ends as image files do, a data URL) or by its name (`picture`, `image_path`, `file_name`), unless its
values are numbers. To add a name: `_NAME`. To add a placeholder: `PLACEHOLDER`. image_check.py checks whole datasets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

PLACEHOLDER = re.compile(
    r"<(?:image|img|video|image[ _]?\d+|start_of_image"
    r"|\|(?:image|img|video|image_pad|video_pad|vision_start|image_\d+)\|)>",
    re.IGNORECASE,
)
"""Placeholders of images and videos in the texts of the model families."""
HOW_TO_READ = (
    "Images are read from the columns 'image' and 'images', or what data.columns.image and data.columns.images name, "
    "and from image parts of the prompt"
)

_SUFFIX = re.compile(r".\.(?:png|jpe?g|webp|gif|bmp|tiff?|heic|heif|avif|jp2)$", re.IGNORECASE)
_OTHER_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")
_MAX_PATH_LENGTH = 4096
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_NAME = re.compile(
    r"(?:.*_)?(?:image|img|picture|pic|photo|photograph|screenshot)s?(?:_?\d+)?"
    r"(?:_?(?:path|file|filename|file_name|name|url|uri|link|src|bytes|data|base64|b64|raw)s?)?|file_?names?|file_?paths?",
    re.IGNORECASE,
)
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[ -]")


def image_columns(columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of columns that look like images, by value or by name."""
    for name, value in columns.items():
        is_name = _NAME.fullmatch(_WORDS.sub("_", str(name)))
        if any(_is_image(v) or _is_path(v) or (is_name and _may_be_image(v)) for v in _values(value)):
            yield name


def holds_image(value: Any) -> bool:
    """Return True if a value, or a value of a list, is an image itself, not a path."""
    return any(map(_is_image, _values(value)))


def _values(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield a value, or the values of a list and of the lists in it."""
    if not isinstance(value, list | tuple):
        yield value
    elif depth:
        for element in value:
            yield from _values(element, depth - 1)


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= set(value) and _is_image(value.get("bytes"))
    if isinstance(value, bytes | bytearray | memoryview):
        head = bytes(value[:16])
        return head.startswith(_MAGIC) or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")
    return isinstance(value, Image.Image) or (isinstance(value, str) and value[:11].lower() == "data:image/")


def _is_path(value: Any) -> bool:
    """Return True if a text, or the path of a datasets.Image, ends like the path or URL of an image."""
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= set(value) and _is_path(value.get("path"))
    if not isinstance(value, str) or len(value) > _MAX_PATH_LENGTH:
        return False
    path = re.split("[?#]", value)[0] if value.startswith(("http://", "https://")) else value
    return bool(_SUFFIX.search(path)) and "\n" not in path


def _may_be_image(value: Any) -> bool:
    """Return True if a value of a column with an image's name can be an image: text, bytes or an object."""
    if isinstance(value, str):
        return bool(value) and not _OTHER_SUFFIX.search(value)
    return value is not None and not isinstance(value, bool | int | float)
