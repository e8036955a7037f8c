"""Images of rows."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

import robustness.run_case as by
from robustness.cases import (
    ODD_FILES,
    ODD_NAMES,
    Call,
    add,
    picture,
)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def media(source: Any, **data: Any) -> Callable[[Path], Call]:
    """A row with one image: bytes are written to a file and named, anything else is given as it is."""

    def make(folder: Path) -> Call:
        given = source
        if isinstance(source, bytes):
            (folder / "i.jpg").write_bytes(source)
            given = "i.jpg"
        return lambda: by.use_rows([{"prompt": "?", "image": given}], **data)

    return make


def frames(kind: str) -> bytes:
    first, *others = [Image.new("RGB", (4, 4), colour) for colour in ("red", "green", "blue")]
    return encoded(first, kind, save_all=True, append_images=others)


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, and whose pixels are not there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")


PNG, JPEG = encoded(picture(40, 40)), encoded(Image.effect_noise((64, 64), 90), "JPEG")
for name, source, words in [
    ("nothing in the file", b"", ["is empty (0 bytes)"]),
    ("half a PNG", PNG[: len(PNG) // 2], ["damaged or truncated"]),
    ("half a JPEG", JPEG[: len(JPEG) // 2], ["damaged or truncated"]),
    ("a header alone", PNG[:24], ["is not an image that can be read"]),
    ("noise behind a header", PNG[:50] + b"\xff" * 200, ["image"]),
    ("an HTML page", b"<!DOCTYPE html><html><body>404</body></html>", ["HTML page"]),
    ("a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
    ("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>", ["SVG"]),
    ("a PDF", b"%PDF-1.7\n", ["PDF"]),
    ("a video", b"\0\0\0\x18ftypisom", ["video"]),
    ("a bomb", png_of(60_000, 60_000), ["pixels"]),
    ("a bomb of 2^31", png_of(2**31 - 1, 2**31 - 1), ["image"]),
    ("0 x 0", png_of(0, 0), ["image"]),
    ("0 x 5", png_of(0, 5), ["image"]),
    ("an animated GIF", frames("GIF"), ["more than one frame"]),
    ("pages of TIFF", frames("TIFF"), ["more than one frame"]),
    ("floats", encoded(Image.new("F", (4, 4)), "TIFF"), ["32 bits"]),
    ("a URL", "https://example.org/a.png", ["nothing is fetched"]),
    ("an S3 address", "s3://bucket/a.png", ["nothing is fetched"]),
    ("a data URL without base64", "data:image/png,xyz", ["without base64"]),
    ("a broken data URL", "data:image/png;base64,@@@", ["not valid base64"]),
    ("an empty text", "", ["is not a path"]),
    ("a number", 3, ["legal is"]),
    ("an empty mapping", {}, ["neither 'bytes' nor 'path'"]),
    ("a mapping of null", {"bytes": None, "path": None}, ["neither 'bytes' nor 'path'"]),
    ("a mapping in a mapping", {"bytes": {"bytes": {"bytes": 3}}}, ["legal is"]),
    ("a file that is not there", "no.png", ["does not exist"]),
    ("a picture of no pixels", picture(0, 0), ["0"]),
    ("a name that is not UTF-8", os.fsdecode(b"\xff.png"), ["does not exist"]),
    ("half a character", "\ud83d.png", ["image"]),
    ("base64 that is no data URL", base64.b64encode(PNG * 200).decode(), ["image"]),
]:  # fmt: skip
    add(f"media: {name}", media(source), *words)
for mode in ("1", "L", "LA", "P", "RGBA", "I;16", "CMYK"):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    add(f"media: mode {mode}", media(encoded(picture(4, 4, mode), kind)), code=0)
PALETTE = encoded(picture(4, 4, "P"), transparency=0)
add("media: a palette with a clear colour", media(PALETTE), code=0)
add("media: PNG named .jpg", media(PNG), code=0)
add("media: a thin strip, decoded", media(encoded(picture(1, 10_000))), code=0)
add("media: too many bytes", media(b"x" * (50 * 2**20 + 1)), "shrink the image")
for name, (make_odd, unix_user) in ODD_FILES.items():

    def odd_image(folder: Path, make_odd: Any = make_odd) -> Call:
        make_odd(folder / "i.png")
        return lambda: by.use_rows([{"prompt": "?", "image": "i.png"}])

    add(f"media: {name}", odd_image, "i.png", unix_user=unix_user)
for name, value in ODD_NAMES.items():
    add(f"media: a path {name}", media(f"{value}.png"), "train row 0")
