"""Columns that look like images or videos, numbered columns of them, and the tags that stand for them in texts.

A column looks like them by its values (a PIL image, encoded bytes, the mapping of datasets.Image and Video, a path or
an address that ends as their files do, a data URL) or by its name (`picture`, `video_path`, `file_name`), unless its
values are numbers. To add a name: `_NAMES`. To add a tag of another model: `PLACEHOLDERS`. media_check.py checks whole
datasets, rows.py puts media in the places of their tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

from PIL import Image

from mm_grpo.errors import DataError
from mm_grpo.messages import MEDIA_TYPES

IMAGE_TAG = "<image>"
IMAGE_PLACE = re.compile(r"(<image>|(?i:<\|?im(?:age|g)[ _-]?(\d{1,4})\|?>))")
"""Tags that are read in every row: of the next image, and of an image by its number, which is the second group."""
MEDIA_PLACE = re.compile(r"(<(?:image|video)>|(?i:<\|?(?:im(?:age|g)|video)[ _-]?(\d{1,4})\|?>))")
"""Tags that are read in a row with videos."""
_MARKUP = (
    r"<(?:img|IMG|video|VIDEO|audio|AUDIO)\s*/?>|<image\s*/>"
    r"|(?<![A-Za-z])<(?:Image|Video|Audio)>|\[IM(?:G(?:_\w+)?|AGE)\]"
)
"""Placeholders that may be text if a row has no image. `List<Image>` and `<img src="a.png">` are text in all rows."""
_PLACEHOLDERS = (
    r"<(im(?:age|g))>(?:<image>|<img_placeholder>|[^<\n]*)</\1>",  # Qwen-VL, InternLM, MiniCPM, around a path
    MEDIA_PLACE.pattern,
    _MARKUP,
    r"(?i:<\|[\w ]*(?:image|img|vision|video|audio|media)[\w ]*\|>)",  # Qwen, Phi, Llama, GLM, Kimi, ERNIE
    r"(?i:<(?:image|img|video|audio)[ _-]?(?:here|placeholder|(?:soft_)?token|pad|patch|context|start|end)>)",
    r"(?i:<(?:start|begin|end)_of_(?:image|video|audio)>)",  # Gemma
    r"<(?:images|IMAGE|im_start|im_end|im_patch|vision_start|vision_end|fake_token_around_image|global-img)>",
)
_PLACEHOLDER = re.compile("|".join(f"(?:{pattern})" for pattern in _PLACEHOLDERS))
"""Placeholders of images, videos and sounds in texts for the models of the field."""
HOW_TO_READ = (
    "Images and videos are read from the columns 'image', 'images', 'video' and 'videos', or what data.columns names "
    "for them; without these from 'image_1', 'image_2', ..., 'video_1', ...; and from parts of the prompt"
)

MEDIA_SUFFIXES = {
    "image": re.compile(r".\.(?:png|jpe?g|webp|gif|bmp|tiff?|heic|heif|avif|jp2)$", re.IGNORECASE),
    "video": re.compile(r".\.(?:mp4|m4v|webm|mov|mkv|avi|flv|wmv|mpe?g|3gp)$", re.IGNORECASE),
}
_OTHER_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")
_MAX_PATH_LENGTH = 4096
_FIRST_BYTES = {
    "image": re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|BM|II\*\0|MM\0\*|RIFF....WEBP", re.DOTALL),
    "video": re.compile(rb"....ftyp(?!hei|avif|mif1)|\x1aE\xdf\xa3|RIFF....AVI ", re.DOTALL),
}
_KIND = (
    r"s?(?:_?\d+)?(?:_?(?:path|file|filename|file_name|name|url|uri|link|src|bytes|data|base64|b64|raw)s?)?"
)
_NAMES = {
    "image": rf"(?:.*_)?(?:image|img|picture|pic|photo|photograph|screenshot){_KIND}|file_?names?|file_?paths?",
    "video": rf"(?:.*_)?(?:video|clip|movie){_KIND}",
}
NUMBERED = re.compile(r"(image|video)_?(\d{1,2})")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[ -]")


def media_columns(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of columns that look like media, by value or by name, and "image" or "video"."""
    for (name, value), medium in product(columns.items(), MEDIA_TYPES):
        is_name = re.fullmatch(_NAMES[medium], _WORDS.sub("_", str(name)), re.IGNORECASE)
        if any(
            _holds(v, medium) or _is_path(v, medium) or (is_name and _may_be_medium(v))
            for v in _values(value)
        ):
            yield name, medium


def numbered_columns(row: Mapping[str, Any], medium: str, row_name: str) -> dict[str, Any]:
    """Return the columns `image_1`, `image_2`, ..., or `video_1`, ... (or from 0), by their numbers.

    Return {} if they hold anything else. DataError if one before the last medium is null or missing.
    """
    matches = (NUMBERED.fullmatch(str(name)) for name in row)
    numbers = sorted((int(match[2]), match[0]) for match in matches if match and match[1] == medium)
    columns = {name: row[name] for _, name in numbers}
    filled = [number for number, name in numbers if row[name] is not None]
    looks = [name for name, kind in media_columns(columns) if kind == medium]
    if not numbers or numbers[0][0] > 1 or len(looks) != len(filled):
        return {}
    if filled != [numbers[0][0] + at for at in range(len(filled))]:
        raise DataError(
            f"{row_name}: of the columns {', '.join(map(repr, columns))} one before the last {medium} is null or "
            f"missing; move the {medium}s up, or list them in '{medium}s'"
        )
    return columns


def unread_tag(text: str, *, places: re.Pattern[str] | None, reads_markup: bool) -> str | None:
    """Return the first placeholder in a text, except tags that are read (`places`) and markup that is text."""
    for tag in _PLACEHOLDER.finditer(text) if "<" in text or "[IM" in text else ():
        is_place = places is not None and places.fullmatch(tag[0])
        if not is_place and not (reads_markup and re.fullmatch(_MARKUP, tag[0])):
            return tag[0]
    return None


def unread_media(columns: Mapping[str, Any], shown: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """Yield the names of columns with other media than a row's, and "image" or "video"; nothing for a row without any.

    `shown` are the sources of the row's images and videos. Paths count, unless it has media of that kind and none as a
    path: texts of other columns often repeat where those came from. An answer may be the name of a file.
    """
    paths = [f"/{source}" for source in chain(*shown.values()) if isinstance(source, str)]
    for medium, sources in shown.items() if any(shown.values()) else ():
        counts = not sources or any(isinstance(source, str) for source in sources)
        for name, value in columns.items():
            texts = (v for v in _values(value) if counts and name != "answer" and isinstance(v, str))
            others = [f"/{text}" for text in texts if _is_path(text, medium) and "://" not in text]
            unread = (o for o in others if not any(o.endswith(path) or path.endswith(o) for path in paths))
            if any(_holds(v, medium) for v in _values(value)) or any(unread):
                yield name, medium


def looks_like_frame(value: Any) -> bool:
    """Return True for what looks like an image and cannot be a video: any but a GIF."""
    if isinstance(value, Mapping):
        return any(map(looks_like_frame, value.values()))
    is_gif = isinstance(value, bytes | str) and (value[:4] == b"GIF8" or value[-4:].lower() == ".gif")
    return not is_gif and (_holds(value, "image") or _is_path(value, "image"))


def _values(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield a value, or the values of a list and of the lists in it."""
    if not isinstance(value, list | tuple):
        yield value
    elif depth:
        for element in value:
            yield from _values(element, depth - 1)


def _holds(value: Any, medium: str) -> bool:
    """Return True for an encoded or a PIL image, or an encoded video."""
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= set(value) and _holds(value.get("bytes"), medium)
    if isinstance(value, bytes | bytearray | memoryview):
        return bool(_FIRST_BYTES[medium].match(bytes(value[:16])))
    is_url = isinstance(value, str) and value[:11].lower() == f"data:{medium}/"
    return is_url or (medium == "image" and isinstance(value, Image.Image))


def _is_path(value: Any, medium: str) -> bool:
    """Return True if a text, or the path of a datasets.Image or Video, ends like the path or URL of a medium."""
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= set(value) and _is_path(value.get("path"), medium)
    if not isinstance(value, str) or len(value) > _MAX_PATH_LENGTH:
        return False
    path = re.split("[?#]", value)[0] if value.startswith(("http://", "https://")) else value
    return bool(MEDIA_SUFFIXES[medium].search(path)) and "\n" not in path


def _may_be_medium(value: Any) -> bool:
    """Return True if a value of a column with a medium's name can be one: text, bytes or an object."""
    if isinstance(value, str):
        return bool(value) and not _OTHER_SUFFIX.search(value)
    return value is not None and not isinstance(value, bool | int | float)
