"""Columns that look like images, numbered columns of images, and the tags that stand for images in texts.

A column looks like images by its values (a PIL image, encoded bytes, the mapping of datasets.Image, a path or an
address that ends as image files do, a data URL) or by its name (`picture`, `image_path`, `file_name`), unless its
values are numbers. To add a name: `_NAME`. To add a tag of another model: `PLACEHOLDERS`. media_check.py checks whole
datasets, rows.py puts images in the places of their tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL import Image

from mm_grpo.errors import DataError

IMAGE_TAG = "<image>"
IMAGE_PLACE = re.compile(rf"{IMAGE_TAG}|(?i:<\|?im(?:age|g)[ _-]?(\d{{1,4}})\|?>)")
"""Tags that are read: of the next image, and of an image by its number."""
_MARKUP = (
    r"<(?:img|IMG|video|VIDEO|audio|AUDIO)\s*/?>|<image\s*/>"
    r"|(?<![A-Za-z])<(?:Image|Video|Audio)>|\[IM(?:G(?:_\w+)?|AGE)\]"
)
"""Placeholders that may be text if a row has no image. `List<Image>` and `<img src="a.png">` are text in all rows."""
_PLACEHOLDERS = (
    r"<(im(?:age|g))>(?:<image>|<img_placeholder>|[^<\n]*)</\1>",  # Qwen-VL, InternLM, MiniCPM, around a path
    IMAGE_PLACE.pattern,
    _MARKUP,
    r"(?i:<\|[\w ]*(?:image|img|vision|video|audio|media)[\w ]*\|>)",  # Qwen, Phi, Llama, GLM, Kimi, ERNIE
    r"(?i:<(?:image|img|video|audio)[ _-]?(?:here|placeholder|(?:soft_)?token|pad|patch|context|start|end)>)",
    r"(?i:<(?:start|begin|end)_of_(?:image|video|audio)>)",  # Gemma
    r"<(?:images|IMAGE|im_start|im_end|im_patch|vision_start|vision_end|fake_token_around_image|global-img)>",
)
_PLACEHOLDER = re.compile("|".join(f"(?:{pattern})" for pattern in _PLACEHOLDERS))
"""Placeholders of images, videos and sounds in texts for the models of the field."""
HOW_TO_READ = (
    "Images are read from the columns 'image' and 'images', or what data.columns.image and data.columns.images name; "
    "without any of these from 'image_1', 'image_2', ...; and from image parts of the prompt"
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
NUMBERED = re.compile(r"image_?(\d{1,2})")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[ -]")


def media_columns(columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of columns that look like images, by value or by name."""
    for name, value in columns.items():
        is_name = _NAME.fullmatch(_WORDS.sub("_", str(name)))
        if any(_is_image(v) or _is_path(v) or (is_name and _may_be_image(v)) for v in _values(value)):
            yield name


def numbered_images(row: Mapping[str, Any], row_name: str) -> dict[str, Any]:
    """Return the columns `image_1`, `image_2`, ... (or from 0) by their numbers; {} if they hold anything but images.

    DataError if one before the last image is null or missing.
    """
    numbers = sorted((int(m[1]), name) for name in row if (m := NUMBERED.fullmatch(str(name))))
    columns = {name: row[name] for _, name in numbers}
    filled = [number for number, name in numbers if row[name] is not None]
    if not numbers or numbers[0][0] > 1 or len([*media_columns(columns)]) != len(filled):
        return {}
    if filled != [numbers[0][0] + at for at in range(len(filled))]:
        raise DataError(
            f"{row_name}: of the columns {', '.join(map(repr, columns))} one before the last image is null or missing; "
            "move the images up, or list them in 'images'"
        )
    return columns


def unread_tag(text: str, *, reads_tags: bool, reads_markup: bool) -> str | None:
    """Return the first placeholder in a text, except tags that are read (IMAGE_PLACE) and markup that is text."""
    for tag in _PLACEHOLDER.finditer(text) if "<" in text or "[IM" in text else ():
        is_place = reads_tags and IMAGE_PLACE.fullmatch(tag[0])
        if not is_place and not (reads_markup and re.fullmatch(_MARKUP, tag[0])):
            return tag[0]
    return None


def unread_images(columns: Mapping[str, Any], images: Sequence[Any]) -> Iterator[str]:
    """Yield the names of columns with other images than the row's `images`; with paths of them if those are paths.

    Texts of other columns often repeat where an image came from, and an answer may be the name of a file.
    """
    shown = [f"/{image}" for image in images if isinstance(image, str)]
    for name, value in columns.items():
        texts = (v for v in _values(value) if shown and name != "answer" and isinstance(v, str))
        paths = [f"/{text}" for text in texts if _is_path(text) and "://" not in text]
        others = (p for p in paths if not any(p.endswith(s) or s.endswith(p) for s in shown))
        if any(map(_is_image, _values(value))) or any(others):
            yield name


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
