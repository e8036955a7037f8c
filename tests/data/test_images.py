"""Image loading: every source, every mode with known pixels, and every refusal on its message."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from reading import encoded

from mm_grpo.data.images import FORMATS, IMAGE, open_image
from mm_grpo.errors import DataError

pytestmark = pytest.mark.lowest

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def opened(source: Any, max_bytes: int = 10**6, max_pixels: int = 10**4, **options: Any) -> Image.Image:
    limits = {"IMAGE": replace(IMAGE, max_bytes=max_bytes), "MAX_PIXELS": max_pixels}
    with patch.multiple("mm_grpo.data.images", **limits):
        return open_image(source, **{"row": "train.jsonl:12"} | options)


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(source, **options)
    return str(caught.value)


def pixels(image: Image.Image) -> list[list[tuple[int, ...]]]:
    assert image.mode == "RGB"
    return [[tuple(p) for p in row] for row in np.asarray(image).tolist()]


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG written by hand, for headers and depths that Pillow does not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        body += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return body


@pytest.fixture
def red_blue() -> Image.Image:
    """Two pixels: red on the left, blue on the right."""
    image = Image.new("RGB", (2, 1), RED)
    image.putpixel((1, 0), BLUE)
    return image


def test_every_kind_of_source(red_blue: Image.Image, tmp_path: Path) -> None:
    data, path = encoded(red_blue), tmp_path / "a b.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    plain = [path, str(path), path.as_uri(), data, bytearray(data), url, red_blue]
    mappings = [{"bytes": data, "path": "gone.png"}, {"bytes": None, "path": str(path)}, {"path": str(path)}]
    local = path.as_uri().replace("file:///", "file://localhost/")
    for source in (*plain, local, *mappings):
        assert pixels(opened(source)) == [[RED, BLUE]], source
    assert pixels(opened("a b.png", image_dir=tmp_path)) == [[RED, BLUE]]
    assert pixels(opened(str(path), image_dir="/elsewhere")) == [[RED, BLUE]]


@pytest.mark.parametrize("data", [*FORMATS, b"MM\0*", b"\0\0\0\x1cftypavif", b"\0\0\0\x20ftypheic"])
def test_base64_alone_is_named(data: Any) -> None:
    data = encoded(Image.effect_noise((30, 30), 80), data) if isinstance(data, str) else data + bytes(300)
    assert "base64 alone" in refusal(base64.b64encode(data).decode())


@pytest.mark.parametrize("name", ["Qk1/" + "a" * 70 + ".bmp", "a" * 90, "AAAA" * 20, "images/" + "b" * 60])
def test_long_paths_are_no_base64(name: str) -> None:
    assert "No such file" in refusal(name)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(kind: str) -> None:
    image = opened(encoded(Image.new("RGB", (8, 6), BLUE), kind))
    assert image.size == (8, 6)
    assert np.abs(np.asarray(image).astype(int) - BLUE).max() <= 2  # JPEG and WebP lose a little


def test_no_file_stays_open_and_nothing_is_shared(red_blue: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    red_blue.save(path)
    image = opened(path)
    path.unlink()
    assert pixels(image) == [[RED, BLUE]]
    copied = opened(red_blue)
    copied.putpixel((0, 0), WHITE)
    assert red_blue.getpixel((0, 0)) == RED


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_exif_orientation_is_applied(kind: str, red_blue: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it a quarter turn clockwise
    options = {"lossless": True} if kind == "WEBP" else {}
    image = opened(encoded(red_blue, kind, exif=exif, **options))
    assert pixels(image) == [[RED], [BLUE]]
    assert image.getexif().get(0x0112) is None
    lazily_opened = Image.open(BytesIO(encoded(red_blue, kind, exif=exif, **options)))
    assert pixels(opened(lazily_opened)) == [[RED], [BLUE]]


def test_transparency_is_laid_over_white(red_blue: Image.Image) -> None:
    rgba = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((255, 51, 0)):
        rgba.putpixel((x, 0), (255, 0, 0, alpha))
    assert pixels(opened(rgba)) == [[RED, (255, 204, 204), WHITE]]  # 51/255 = 0.2 of red over white
    assert pixels(opened(encoded(rgba))) == [[RED, (255, 204, 204), WHITE]]

    grey = Image.new("LA", (2, 1), (0, 255))
    grey.putpixel((1, 0), (0, 0))
    assert pixels(opened(encoded(grey))) == [[(0, 0, 0), WHITE]]

    palette = red_blue.quantize(2)
    clear = palette.getpixel((1, 0))
    assert pixels(opened(encoded(palette, transparency=clear))) == [[RED, WHITE]]
    assert pixels(opened(encoded(red_blue, transparency=BLUE))) == [[RED, WHITE]]


def test_bytes_are_limited_before_anything_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "big.png"
    path.write_bytes(b"x" * 201)  # not even an image: the size is looked at first
    assert "has 201 bytes" in refusal(path, max_bytes=100)
    url = "data:image/png;base64," + "A" * 400
    for source in (path, b"x" * 101, {"bytes": b"x" * 101, "path": "a.png"}, url):
        assert "100 are allowed" in refusal(source, max_bytes=100)
    data = encoded(Image.new("RGB", (2, 2)))
    assert opened(data, max_bytes=len(data)).size == (2, 2)


def test_pixels_are_limited_by_the_header_alone() -> None:
    bomb = png(300, 200, 8, 2, b"")  # no pixel data at all: decoding would fail otherwise
    assert "60000 pixels" in refusal(bomb) and "10000" in refusal(bomb)
    message = refusal(png(60000, 60000, 8, 2, b""), max_pixels=10**5)
    assert "3600000000 pixels" in message and "100000" in message
    assert "20000 pixels" in refusal(Image.new("RGB", (200, 100)))
    assert opened(encoded(Image.new("RGB", (100, 100)))).size == (100, 100)


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    (tmp_path / "cut.jpg").write_bytes(encoded(noise, "JPEG")[:900])
    assert "image 'cut.jpg' is damaged or truncated (" in refusal("cut.jpg", image_dir=tmp_path)
    for kind in ("PNG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encoded(noise, kind)
        assert re.search(r"is damaged or truncated|is not an image", refusal(data[: len(data) // 2])), kind


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"hello there", ("is not an image", "PNG")),
        (b"\0\0\0\x20ftypheic\0\0", ("HEIC",)),
        ("empty.png", ("'empty.png'", "is empty")),
        ("gone.png", ("'gone.png'", "cannot be read", "data.image_dir")),
        ("data:image/png,abc", ("data:image/png;base64",)),
        (encoded(Image.fromarray(np.zeros((1, 1), dtype=np.uint16))), ("'I;16'", "8 bits")),
        (Image.new("F", (1, 1)), ("'F'", "8 bits")),
        (np.zeros((2, 2, 3)), ("ndarray", "a path, bytes")),
    ],
)
def test_what_is_no_image_is_refused_by_its_row(source: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    message = refusal(source, image_dir=tmp_path)
    assert "data.image_dir" not in refusal("gone.png")  # not of a dataset's row
    assert message.startswith("train.jsonl:12: ") and all(word in message for word in words), message


def test_the_folder_of_a_file_is_looked_for_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name / f"photos-{name}").mkdir(parents=True)
        (tmp_path / name / f"photos-{name}" / "a.png").touch()
        monkeypatch.chdir(tmp_path / name)
        assert f"data.image_dir=photos-{name}" in refusal("a.png", image_dir=".")


def test_animations_are_refused_and_phone_photos_are_not(red_blue: Image.Image) -> None:
    other = Image.new("RGB", (2, 1), WHITE)
    for kind in ("GIF", "TIFF", "PNG", "WEBP"):
        moving = encoded(red_blue, kind, save_all=True, append_images=[other])
        assert "more than one frame" in refusal(moving), kind
    small, photo = Image.new("RGB", (4, 4)), Image.new("RGB", (8, 8), BLUE)
    assert opened(encoded(photo, "MPO", save_all=True, append_images=[small])).size == (8, 8)
