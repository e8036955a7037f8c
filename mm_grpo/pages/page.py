"""HTML of a page: its data as JSON, its images, and the style and the script that draw it.

Everything that a run, a dataset or a model wrote is data: page.js puts it into text nodes and attributes by name, and
never parses it as HTML. The page's content policy allows one script and one style, by hash, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL.Image import Image

from mm_grpo.files import data_url
from mm_grpo.terminal import printable

FRAME = (240, 10_000)
"""Pixels of a side of a video's frame, and bytes of a PNG from which it is shown as JPEG."""
GENERATOR = b'<meta name="generator" content="mm_grpo">'
"""Mark near the start of each page. A file without it is not ours and is not overwritten."""
SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{generator}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src {style_hash}; \
script-src {script_hash}; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main><noscript><h1>{title}</h1><p>This page is drawn by its own script, which does not run here.</p></noscript></main>
<svg class="store" aria-hidden="true"><defs id="pictures"></defs></svg>
<script type="application/json" id="data">{data}</script>
{pictures}
<script>{script}</script>
</body>
</html>
"""


@dataclass(frozen=True)
class PageImage:
    """Image of a page. Width and height are in the pixels of overlays; the data URL may hold a smaller image."""

    width: int
    height: int
    uri: str

    @classmethod
    def reduced(cls, image: Image, side: int, max_png_bytes: int) -> PageImage:
        """Reduce an image to `side` pixels at most."""
        small = image.convert("RGB")
        small.thumbnail((side, side))
        return cls(*image.size, encode_image(small, max_png_bytes)[0])


def render(title: str, data: Mapping[str, Any], images: Mapping[str, PageImage]) -> str:
    """Return the HTML of a page. `data` is plain JSON; its "kind" is run or check.

    Names of `images` consist of letters, digits, dots and dashes.
    """
    here = Path(__file__)
    style, script = (here.with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    uris = (f'<script type="text/plain" id="u-{name}">{image.uri}</script>' for name, image in images.items())
    sizes = {name: [image.width, image.height] for name, image in images.items()}
    return SHELL.format(
        generator=GENERATOR.decode(),
        title=escape(printable(title, lines=False)),
        style=style,
        script=script,
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
        data=inert_json({**data, "pictures": sizes}),
        pictures="\n".join(uris),
    )


def inert_json(value: Any) -> str:
    """Write `value` as JSON for a <script> element: nothing in it ends the element or begins a tag.

    Texts are printable (terminal.py): control characters and bidirectional marks are shown as escapes. Numbers that are
    not finite become null.
    """
    text = json.dumps(_printable(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def policy_hash(text: str) -> str:
    """Return the source of a content security policy that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def encode_image(
    image: Image, max_png_bytes: int, *, quality: int = 85, subsampling: int = -1
) -> tuple[str, str]:
    """Return an image as a data URL, and its format: png, or jpeg if the PNG has more than `max_png_bytes`."""
    out, form = io.BytesIO(), "png"
    image.save(out, "PNG")
    if out.tell() > max_png_bytes:
        out, form = io.BytesIO(), "jpeg"
        image.convert("RGB").save(out, "JPEG", quality=quality, subsampling=subsampling)
    return data_url(f"image/{form}", out.getvalue()), form


def cut(text: str, limit: int) -> str:
    """Return the first `limit` characters; if there are more, with their number."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def as_text(value: Any) -> str:
    """Return a column's value as text; bytes and images are only named."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_name_of)
    except (TypeError, ValueError):  # a key is not a text
        return _name_of(value)


def _name_of(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
