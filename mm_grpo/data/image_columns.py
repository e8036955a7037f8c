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
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from PIL import Image

from mm_grpo.errors import DataError

LOOKED_AT = 1000
"""Rows of a dataset that is not in memory which are looked at."""
PLACEHOLDER = re.compile(
    r"<(?:image|img|video|image[ _]?\d+|start_of_image"
    r"|\|(?:image|img|video|image_pad|video_pad|vision_start|image_\d+)\|)>",
    re.IGNORECASE,
)
"""Placeholders of images and videos in the texts of the model families."""

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
_HOW_TO_READ = (
    "Images are read from the columns 'image' and 'images', or what data.columns.image and data.columns.images name, "
    "and from image parts of the prompt"
)


class MissingImages(DataError):
    """Rows would be trained on without their images."""


class _Fields(Protocol):
    @property
    def messages(self) -> tuple[dict[str, Any], ...]: ...
    @property
    def images(self) -> tuple[Any, ...]: ...
    @property
    def columns(self) -> dict[str, Any]: ...
    @property
    def boxes(self) -> bool: ...


class ImageRows(Protocol):
    """The members of a dataset that are used here."""

    name: str

    def __len__(self) -> int: ...
    @property
    def in_memory(self) -> bool: ...
    def row_name(self, index: int) -> str: ...
    def encoded_fields(self, index: int) -> _Fields: ...
    def dataset_column(self, name: str) -> str: ...


def check_images(dataset: ImageRows, *, verify: bool) -> None:  # noqa: C901
    """Refuse rows that would be trained on without their images. Without `verify`, a row that cannot be read is passed.

    A column that holds images beside those that are read is reported once, as a warning: it may be meant for a reward.

    Raises:
        MissingImages: a row without an image of its own has a column that looks like one, or no row has an image.
        DataError: with `verify`, a row that is looked at cannot be read.
    """
    count = len(dataset)
    step = 1 if dataset.in_memory else -(-count // LOOKED_AT)
    indices = range(0, count, step)
    seen = f"all {count}" if step == 1 else f"{len(indices)} of {count}, evenly spaced,"
    with_image = readable = 0
    boxes: int | None = None
    unread: dict[str, int] = {}
    names: dict[str, None] = {}
    for index in indices:
        try:
            fields = dataset.encoded_fields(index)
        except DataError:
            if verify:
                raise
            continue
        readable += 1
        boxes = index if fields.boxes and boxes is None else boxes
        if fields.images:
            with_image += 1
            for name, value in fields.columns.items():
                if name not in unread and _is_image(value):
                    unread[name] = index
            continue
        names.update(dict.fromkeys(fields.columns))
        column = next(image_columns(fields.columns), None)
        if column is not None:
            found = dataset.dataset_column(column)
            raise MissingImages(
                f"{dataset.row_name(index)}: the column {found!r} looks like images and is not read, and the row has "
                f"no other image: it would be trained on as text alone. {_HOW_TO_READ}. Set "
                f"data.columns.images={found}; if the rows are to be used without images, data.text_only=true "
                f"(of {count} rows, this one was number {readable} that was looked at)"
            )
        for message in fields.messages:
            key = next(
                image_columns({k: v for k, v in message.items() if k not in ("role", "content")}), None
            )
            if key is not None:
                raise MissingImages(
                    f"{dataset.row_name(index)}: a message of the prompt has the key {key!r}, which looks like images "
                    f"and is not read, and the row has no other image. {_HOW_TO_READ}, written {{'type': 'image'}}. "
                    "Move it there; if the rows are to be used without images, set data.text_only=true"
                )
    if readable and not with_image:
        columns = ", ".join(repr(dataset.dataset_column(name)) for name in names) or "none"
        raise MissingImages(
            f"{dataset.name}: no row has an image (rows looked at: {seen} from {dataset.row_name(0)}), and the model "
            f"is one of vision and language. {_HOW_TO_READ}; the other columns are {columns}. Name the column that "
            "holds the images, as in data.columns.images=COLUMN, or set data.text_only=true to train on text alone"
        )
    if boxes is not None:
        logging.getLogger(__name__).warning(
            "%s: the prompt's boxes (<bbox>) are written with the numbers of 'objects'; a model that counts "
            "pixels of the resized image, or thousandths, reads others: write them as the model counts",
            dataset.row_name(boxes),
        )
    for name, index in unread.items():
        logging.getLogger(__name__).warning(
            "%s: the column %r holds an image that the model is not shown, beside one that it is; rewards can ask "
            "for it",
            dataset.row_name(index),
            dataset.dataset_column(name),
        )


def missing_images(values: Mapping[str, Any], row_name: str) -> MissingImages | None:
    """Make the message on the images of a row without a prompt, from values under our names; None where it has some."""
    if any(
        _looks_like_image(value) or _may_be_image(value) for value in map(values.get, ("image", "images"))
    ):
        return None
    column = next(image_columns(values), None)
    found = (
        f"the column {column!r} looks like images: set data.columns.images={column}"
        if column
        else _HOW_TO_READ
    )
    return MissingImages(f"{row_name}: the row has no image that is read; {found}")


def image_columns(columns: Mapping[str, Any]) -> Iterator[str]:
    """The names of columns that look like images, by value or by name."""
    for name, value in columns.items():
        if _looks_like_image(value) or (_NAME.fullmatch(_WORDS.sub("_", str(name))) and _may_be_image(value)):
            yield name


def _is_image(value: Any, depth: int = _DEEPEST) -> bool:
    """True when a value is an image itself, not the path of one."""
    if isinstance(value, list | tuple):
        return depth > 0 and any(_is_image(one, depth - 1) for one in value)
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= set(value) and _is_image(value.get("bytes"))
    if isinstance(value, bytes | bytearray | memoryview):
        head = bytes(value[:16])
        return head.startswith(_MAGIC) or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")
    return isinstance(value, Image.Image) or (isinstance(value, str) and value[:11].lower() == "data:image/")


def _looks_like_image(value: Any, depth: int = _DEEPEST) -> bool:
    """True when a value is an image, its path or address, or a list with one of those."""
    if isinstance(value, list | tuple):
        return depth > 0 and any(_looks_like_image(one, depth - 1) for one in value)
    if isinstance(value, Mapping):
        return bool(value) and {"bytes", "path"} >= set(value) and any(map(_looks_like_image, value.values()))
    if not isinstance(value, str) or len(value) > _LONGEST_PATH:
        return _is_image(value)
    if _is_image(value) or (_SUFFIX.search(value) and "\n" not in value):
        return True
    if not value.startswith(("http://", "https://")):
        return False
    try:
        return bool(_SUFFIX.search(urlsplit(value).path))
    except ValueError:
        return False


def _may_be_image(value: Any, depth: int = _DEEPEST) -> bool:
    """True when the value of a column with the name of images can be one: text, bytes or an object, but no number."""
    if isinstance(value, list | tuple):
        return depth > 0 and any(_may_be_image(one, depth - 1) for one in value)
    if isinstance(value, str):
        return bool(value) and not _OTHER_SUFFIX.search(value)
    return not (
        value is None or isinstance(value, bool | int | float) or (isinstance(value, Mapping) and not value)
    )
