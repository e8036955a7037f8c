"""Safe image loading: an image source of a row becomes one upright RGB picture, fully in memory.

A source is a path, bytes, the `{"bytes": ..., "path": ...}` of the datasets library, a base64 data URL
or a PIL image. In this order:

    read       at most MAX_BYTES; nothing is fetched over a network
    identify   by the header; PNG, JPEG, WebP, GIF, BMP and TIFF, one frame
    limit      the header's pixel count, before a pixel is decoded (decompression bombs)
    decode     fully: a truncated file fails here, and no file handle stays open
    turn       by the EXIF orientation
    convert    to RGB: transparency over white; pixels of more than 8 bits a channel are refused

Not here: resizing (processors/), and which images belong to a row (rows.py). Colour profiles are
not applied. To allow one more format: `FORMATS` and a case in the tests.
"""

from __future__ import annotations

import base64
import glob
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from PIL import Image, ImageOps

from mm_grpo.data.columns import brief
from mm_grpo.data.file_states import FileStates
from mm_grpo.errors import BadMedia
from mm_grpo.files import expand_home, open_regular_file

MAX_BYTES = 50 * 1024 * 1024
"""Size limit of an encoded image."""
MAX_PIXELS = 178956970 // 2
"""Limit of an image's area before the resize."""
HEADER_BYTES = 2**14
"""Bytes from the start of a file that hold the header of nearly every picture."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True)
class SourceKind:
    """Words and the limit in messages about the sources of images, or of videos."""

    noun: str
    data_url: str
    opened: str
    """A source that Python programs give."""
    max_bytes: int

    @property
    def legal(self) -> str:
        """What a source may be."""
        return (
            f"a path, bytes, a mapping with 'bytes' or 'path', a data URL ({self.data_url}) or {self.opened}"
        )


IMAGE = SourceKind("image", "data:image/png;base64,...", "a PIL image", MAX_BYTES)
Folder = str | Path | None
Files = FileStates | None
Size = tuple[int, int]
Limits = tuple[tuple[str, int], ...]
"""PIXEL_LIMITS of an image and their values."""
Refusal = Callable[[Size, Limits], str]
"""Returns why a model refuses an upright image of (height, width) pixels; "" if it does not."""

# Pillow's modes
_EIGHT_BITS = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"})
# the first bytes of PNG, JPEG, GIF, WebP and AVI, BMP, TIFF (two orders), HEIC, AVIF and MP4, WebM, encoded
_BASE64 = re.compile(
    r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk[0-3]|SUkq|TU0AK|AAAA.GZ0eX|GkXf)[A-Za-z0-9+/\s]+={0,2}\s*"
)
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
# common files that are no image: (bytes, offset, description)
_IMPOSTORS = (
    (b"version https://git-lfs", 0, "a Git LFS pointer: run `git lfs pull`"),
    (b"<!doctype html", 0, "an HTML page, as a failed download leaves behind"),
    (b"<html", 0, "an HTML page, as a failed download leaves behind"),
    (b"ftyphei", 4, "a HEIC image"),
)


_SHARED_IMAGES = threading.Lock()
"""Held while a PIL image of the user's is read: rows that share an image may be opened by several threads."""
_thread = threading.local()
PICTURES = ("images", "frames")
"""Kinds of pictures that are counted when they are decoded; frames are those of videos."""


def decoded_here() -> Counter[str]:
    """Return how many of PICTURES the calling thread has decoded so far."""
    return Counter(getattr(_thread, "decoded", None))


def count_decoded(noun: str) -> None:
    """Count one picture that the calling thread decoded."""
    _thread.decoded = decoded_here() + Counter({noun: 1})


def open_image(
    source: Any, *, row: str, image_dir: Folder = None, files: Files = None, count_as: str = "images"
) -> Image.Image:
    """Open one source as a picture that is upright, RGB, fully decoded and independent of the source.

    Args:
        source: a path (relative ones start at `image_dir`), bytes, a mapping with `bytes` or `path`, a
            base64 data URL, a file:// URL, or a PIL image.
        row: what messages call the row, such as "train.jsonl:12".
        files: states of files at the first look; a file that changed since is a DataError.
        count_as: which of PICTURES it is counted as.

    Raises:
        BadMedia: the image is missing, not an image, truncated, too large, animated, or of a kind that
            has no faithful RGB form.
    """
    is_image = isinstance(source, Image.Image)
    if is_image:
        opened, where = source, f"{row}: image (a PIL image)"
    else:
        data, where = read_encoded(source, row, image_dir, files)
        opened = _identify(data, where)
    limit_pixels(opened.size, where)
    with _SHARED_IMAGES if is_image else nullcontext():
        decoded = _decode(opened, where)
    count_decoded(count_as)
    return to_rgb(decoded, where)


def look_at_image(
    source: Any, row: str, image_dir: Folder, files: Files, refusal: Refusal | None, limits: Limits
) -> None:
    """Raise as `open_image` for an image that is missing, too large, or no image by its header, or by `refusal`.

    Of most files only the first bytes are read. Nothing is decoded, unless an image is refused in one turn only.
    """
    if isinstance(source, Image.Image):
        size, where = source.size, f"{row}: image (a PIL image)"
    else:
        size, where = _header_size(source, row, image_dir, files)
    limit_pixels(size, where)
    if refusal is None:
        return
    why = refusal(size[::-1], limits)
    if bool(why) != bool(refusal(size, limits)):  # EXIF may turn it
        why = refusal(open_image(source, row=row, image_dir=image_dir).size[::-1], limits)
    if why:
        raise BadMedia(f"{where} {why}")


def _header_size(source: Any, row: str, image_dir: Folder, files: Files) -> tuple[Size, str]:
    """Return (width, height) of an encoded image, before it is turned, and its name in messages."""
    # an EXIF block may stand before a JPEG's size, WebP needs all bytes, and a TIFF's header may be at the end
    for at_most in (HEADER_BYTES, 16 * HEADER_BYTES, -1):
        data, where = read_encoded(source, row, image_dir, files, at_most)
        try:
            return _identify(data, where).size, where
        except BadMedia as error:
            fault = error
    raise fault


def open_images(sources: Sequence[Any], *, row: str, **options: Any) -> tuple[Image.Image, ...]:
    """Open the pictures of a row by `open_image`."""
    names = numbered(row, "image", len(sources))
    return tuple(open_image(s, row=name, **options) for s, name in zip(sources, names, strict=True))


def numbered(row: str, noun: str, count: int) -> list[str]:
    """Return the names of a row's sources in messages; the row's own if there is one source."""
    return [row] if count == 1 else [f"{row}, {noun} {number} of {count}" for number in range(1, count + 1)]


def read_encoded(
    source: Any, row: str, image_dir: Folder, files: Files, at_most: int = -1, kind: SourceKind | None = None
) -> tuple[bytes, str]:
    """Return the encoded bytes of an image, or of a `kind`, or the first `at_most`, and its name in messages."""
    file, where = open_encoded(source, row, image_dir, kind or IMAGE, files)
    with file:
        try:
            return file.read(at_most), where
        except OSError as error:
            raise BadMedia(f"{where} cannot be read ({error.strerror})") from None


def open_encoded(
    source: Any,
    row: str,
    image_dir: Folder,
    kind: SourceKind,
    files: Files,
    label: str = "(bytes in the row)",
) -> tuple[BinaryIO, str]:
    """Open the encoded bytes of a source, `kind.max_bytes` at most, and return its name in messages too.

    `label` is the name of bytes.
    """
    if isinstance(source, Mapping):
        inner, path = source.get("bytes"), source.get("path")
        if inner is None and path is None:
            raise BadMedia(f"{row}: the {kind.noun} has neither 'bytes' nor 'path'; legal is {kind.legal}")
        label = label if path is None else _label(str(path))
        return open_encoded(path if inner is None else inner, row, image_dir, kind, files, label)
    where = f"{row}: {kind.noun} "
    file: BinaryIO
    if isinstance(source, bytes | bytearray | memoryview):
        where += label
        file = BytesIO(source)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        where += brief(source)
        file = BytesIO(_read_data_url(source, where, kind))
    elif isinstance(source, str | os.PathLike):
        name = os.fsdecode(source)
        where += _label(name)
        file = _open_file(name, where, image_dir, kind, files)
    else:
        raise BadMedia(f"{row}: the {kind.noun} is a {type(source).__name__}; legal is {kind.legal}")
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if 0 < size <= kind.max_bytes:
        return file, where
    file.close()
    _limit_bytes(size, where, kind)
    raise BadMedia(f"{where} is empty (0 bytes); write it again or leave the row out")


def _label(name: str) -> str:
    return repr(name) if len(name) <= 200 else brief(name)


def _read_data_url(url: str, where: str, kind: SourceKind) -> bytes:
    header, _, payload = url.partition(",")
    if not header.lower().endswith(";base64"):
        raise BadMedia(f"{where} is a data URL without base64; write it as {kind.data_url}")
    _limit_bytes(len(payload) * 3 // 4 - 2, where, kind)  # base64 has up to two bytes of padding
    try:
        return base64.b64decode("".join(unquote(payload).split()), validate=True)
    except ValueError as error:
        raise BadMedia(f"{where} is not valid base64 ({error}); encode the file's bytes again") from None


def _open_file(name: str, where: str, image_dir: Folder, kind: SourceKind, files: Files) -> BinaryIO:
    if len(name) > 64 and _BASE64.fullmatch(name):
        raise BadMedia(f"{where} is base64 alone; write it as {kind.data_url}")
    scheme = _URL.match(name)
    if scheme and scheme[1].lower() == "file":
        name = unquote(re.sub("^localhost(?=/)", "", name[len("file://") :], flags=re.IGNORECASE))
    elif scheme:
        raise BadMedia(f"{where} is a URL, and nothing is fetched; download it and give the file's path")
    folder = str(image_dir or ".")
    try:
        path = os.path.join(expand_home(folder), expand_home(name))
        if files is not None:
            files.look(path, where=where)
        return open_regular_file(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL, half a character, an unknown user
        why = f"{where} cannot be read ({getattr(error, 'strerror', None) or error})"
        missing = isinstance(error, FileNotFoundError) and image_dir is not None
    if missing and (near := _nearby_folder(folder, name)) is not None:
        raise BadMedia(f"{why}; '{os.path.join(near, name)}' exists: data.image_dir={near}")
    rule = ", which is data.image_dir, or the dataset file's folder if that is not set"
    start = f"relative paths start at {os.path.abspath(folder)}{'' if image_dir is None else rule}"
    raise BadMedia(f"{why}; {start}")


def _nearby_folder(folder: str, name: str) -> str | None:
    """Return the folder above, in or next to `folder` that holds the file; None if there is none."""
    folders = folders_near(os.path.abspath(expand_home(folder)))
    return next((os.path.relpath(near) for near in folders if os.path.isfile(os.path.join(near, name))), None)


@lru_cache
def folders_near(here: str) -> list[str]:
    above = os.path.dirname(here)
    inside = (sorted(glob.glob(os.path.join(glob.escape(folder), "*", ""))) for folder in (here, above))
    return [above, *chain.from_iterable(inside)]


def limit_pixels(size: Size, where: str) -> None:
    """Raise BadMedia if a picture of (width, height) pixels has more than MAX_PIXELS, or none."""
    width, height = size
    if not 0 < width * height <= MAX_PIXELS:
        raise BadMedia(
            f"{where} is {width} × {height} = {width * height} pixels; legal are 1 to {MAX_PIXELS}: shrink it"
        )


def _limit_bytes(size: int, where: str, kind: SourceKind) -> None:
    if size > kind.max_bytes:
        raise BadMedia(f"{where} has {size} bytes; {kind.max_bytes} are allowed: shrink it")


def _identify(data: bytes, where: str) -> Image.Image:
    """Open an image: its header is read, and no pixel decoded."""
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadMedia(
            f"{where} has too many pixels ({error}); legal are 1 to {MAX_PIXELS}: shrink the image"
        ) from None
    except MemoryError:
        raise
    except Exception:  # Pillow's readers raise nearly anything on a broken header
        raise not_readable(where, "an image", data, FORMATS) from None


def not_readable(where: str, noun: str, data: bytes, formats: Iterable[str]) -> BadMedia:
    """Return the error about a file, of which `data` are the first bytes, that has none of the formats."""
    head = data[:64].lstrip().lower()
    looks = next(
        (f" (it looks like {kind})" for magic, at, kind in _IMPOSTORS if head.startswith(magic, at)), ""
    )
    return BadMedia(f"{where} is not {noun} that can be read{looks}; legal are {', '.join(formats)}")


def _decode(image: Image.Image, where: str) -> Image.Image:
    """Return a decoded, upright copy of an image with one frame."""
    try:
        # a phone's multi-picture JPEG (MPO) is a photo with previews, and the photo comes first
        animated = image.format != "MPO" and getattr(image, "is_animated", False)
        if not animated:
            image.load()
            return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception as error:  # as for the header: OSError, SyntaxError, struct.error, zlib.error, ...
        raise BadMedia(
            f"{where} is damaged or truncated ({error}); write or download it again, or leave the row out"
        ) from None
    raise BadMedia(
        f"{where} has more than one frame or page, and would lose all but the first; "
        "save the frame that is meant as PNG or JPEG"
    )


def to_rgb(image: Image.Image, where: str) -> Image.Image:
    """Return an RGB copy, transparency over white. BadMedia for a mode without a faithful one."""
    if image.mode not in _EIGHT_BITS:
        raise BadMedia(
            f"{where} has pixels of mode {image.mode!r}, whose range is not known; save it with 8 bits per channel"
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    # convert("RGB") alone would show the colour beneath the transparent pixels
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
