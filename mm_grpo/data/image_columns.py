"""Images that a row holds and nothing reads: columns that look like images, placeholders in texts, rows with neither.

A run of a vision-language model on such rows trains on text alone and looks as any other, so `check_images` refuses
it before a model is loaded. `data.text_only` allows it.

A column looks like images by its values (a PIL image, encoded bytes, the mapping of datasets.Image, a path or an
address that ends as image files do, a data URL) or by its name (`picture`, `image_path`, `file_name`), unless its
values are numbers. To know one more name: `_NAME`. To know one more placeholder: `PLACEHOLDER`.

Of rows in memory and of JSON files every row is looked at, of other datasets `LOOKED_AT` rows, evenly spaced. No
image is decoded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from PIL import Image

from mm_grpo.errors import DataError

log = logging.getLogger(__name__)
LOOKED_AT = 1000
"""Rows of a dataset that is not in memory which are looked at."""
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
_LONGEST_PATH = 4096
_DEEPEST = 2  # lists in lists that are looked into
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_NAME = re.compile(
    r"(?:.*_)?(?:image|img|picture|pic|photo|photograph|screenshot)s?(?:_?\d+)?"
    r"(?:_?(?:path|file|filename|file_name|name|url|uri|link|src|bytes|data|base64|b64|raw)s?)?|file_?names?|file_?paths?",
    re.IGNORECASE,
)
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[ -]")


class MissingImages(DataError):
    """Rows would be trained on without their images."""


class ImageRows(Protocol):
    """The members of a dataset that are used here; its fields are those of rows.py."""

    name: str

    def __len__(self) -> int: ...
    @property
    def in_memory(self) -> bool: ...
    def row_name(self, index: int) -> str: ...
    def encoded_fields(self, index: int) -> Any: ...
    def dataset_column(self, name: str) -> str: ...


def check_images(dataset: ImageRows, *, verify: bool) -> None:
    """Refuse rows that would be trained on without their images. Without `verify`, a row that cannot be read is passed.

    A column that holds images beside those that are read is reported once, as a warning: it may be meant for a reward.
    So are boxes in a prompt, whose pixels a model may count otherwise.

    Raises:
        MissingImages: a row without an image of its own has a column that looks like one, or no row has an image.
        DataError: with `verify`, a row that is looked at cannot be read.
    """
    step = 1 if dataset.in_memory else -(-len(dataset) // LOOKED_AT)
    indices = range(0, len(dataset), step)
    with_image = readable = 0
    warned: set[str] = set()
    names: dict[str, None] = {}
    for index in indices:
        try:
            fields = dataset.encoded_fields(index)
        except DataError:
            if verify:
                raise
            continue
        row_name, readable = dataset.row_name(index), readable + 1
        if fields.boxes and "" not in warned:
            warned.add("")
            log.warning(
                "%s: the prompt's boxes (<bbox>) are written with the numbers of 'objects'; a model that counts "
                "pixels of the resized image, or thousandths, reads others: write them as the model counts",
                row_name,
            )
        if not fields.images:
            names.update(dict.fromkeys(fields.columns))
            _refuse_unread(dataset, row_name, fields.columns)
            continue
        with_image += 1
        for name, value in fields.columns.items():
            if name not in warned and _is_image(value):
                warned.add(name)
                log.warning(
                    "%s: the column %r holds an image that the model is not shown, beside one that it is; rewards can "
                    "ask for it",
                    row_name,
                    dataset.dataset_column(name),
                )
    if readable and not with_image:
        columns = ", ".join(repr(dataset.dataset_column(name)) for name in names) or "none"
        raise MissingImages(
            f"{dataset.name}: no row has an image (rows looked at: {len(indices)} of {len(dataset)}, from "
            f"{dataset.row_name(0)}), and the model is one of vision and language. {HOW_TO_READ}; the other columns "
            f"are {columns}. Name the column that holds the images, as in data.columns.images=COLUMN, or set "
            "data.text_only=true to train on text alone"
        )


def _refuse_unread(dataset: ImageRows, row_name: str, columns: Mapping[str, Any]) -> None:
    column = next(image_columns(columns), None)
    if column is not None:
        name = dataset.dataset_column(column)
        raise MissingImages(
            f"{row_name}: the column {name!r} looks like images and is not read, and the row has no other image: it "
            f"would be trained on as text alone. {HOW_TO_READ}. Set data.columns.images={name}; if the rows are to be "
            "used without images, data.text_only=true"
        )


def image_columns(columns: Mapping[str, Any]) -> Iterator[str]:
    """The names of columns that look like images, by value or by name."""
    for name, value in columns.items():
        named = _NAME.fullmatch(_WORDS.sub("_", str(name)))
        if any(_holds(value, test) for test in (_is_image, _is_path, *([_may_be_image] if named else []))):
            yield name


def _holds(value: Any, test: Callable[[Any], bool], depth: int = _DEEPEST) -> bool:
    """True when a value passes a test, or something in a list does."""
    if isinstance(value, list | tuple):
        return depth > 0 and any(_holds(one, test, depth - 1) for one in value)
    return test(value)


def _is_image(value: Any) -> bool:
    """True when a value, or one of a list, is an image itself, not the path of one."""
    if isinstance(value, list | tuple):
        return _holds(value, _is_image)
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= set(value) and _is_image(value.get("bytes"))
    if isinstance(value, bytes | bytearray | memoryview):
        head = bytes(value[:16])
        return head.startswith(_MAGIC) or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")
    return isinstance(value, Image.Image) or (isinstance(value, str) and value[:11].lower() == "data:image/")


def _is_path(value: Any) -> bool:
    """True when a text, or that in the mapping of datasets.Image, ends as the path or the address of an image does."""
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= set(value) and _is_path(value.get("path"))
    if not isinstance(value, str) or len(value) > _LONGEST_PATH:
        return False
    path = re.split("[?#]", value)[0] if value.startswith(("http://", "https://")) else value
    return bool(_SUFFIX.search(path)) and "\n" not in path


def _may_be_image(value: Any) -> bool:
    """True when the value of a column with the name of images can be one: text, bytes or an object, but no number."""
    if isinstance(value, str):
        return bool(value) and not _OTHER_SUFFIX.search(value)
    empty = value is None or (isinstance(value, Mapping) and not value)
    return not empty and not isinstance(value, bool | int | float)
