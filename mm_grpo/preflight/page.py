"""The page of `mm-grpo check --page`: what the model sees of the first rows, in one file that needs nothing else.

Images at the size that the processor gives them, with the gold boxes and points of run/marks.py drawn over them; the
prompt decoded from the very ids that the engine is sent; counts of tokens; rows that are refused; rows that training
and evaluation share. Everything is data: the template (page.html.j2) escapes all of it, and its policy lets a browser
load nothing and run nothing. `CheckPage` is given rows while they are checked, so that nothing is made twice.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.files import OutputFile
from mm_grpo.preflight.gold_text import gold_text
from mm_grpo.run.marks import Mark, gold_marks
from mm_grpo.terminal import printable

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.processors.base import Processor
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Prompt

NAME = "check.html"
WRITTEN_BY = b'<meta name="generator" content="mm_grpo check">'
"""Stands near the start of each page: a file without it is somebody else's, and is not written over."""
ROWS = 20
MOST_BYTES = 24_000_000
"""Of the images and texts of a page's rows; those after that are not shown."""
LARGEST_PNG = 600_000
"""Bytes of an image that is shown as PNG, pixel by pixel as the model gets it; a larger one is shown as JPEG."""
LONGEST_TEXT = 20_000
"""Characters of one prompt on the page."""
LONGEST_VALUE = 400
LISTED = 50
"""Refused rows of a set that are listed; the others are counted."""
EXAMPLES = 8
"""Rows that training and evaluation share, of which as many are named."""
BARS = 24


@dataclass
class _Set:
    """What is known of one set: lengths of its prompts with their rows, rows that are refused, and digests."""

    lengths: list[tuple[int, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    rows: list[tuple[str, bytes, bytes | None]] = field(default_factory=list)


class CheckPage:
    """Collects the rows of a check, and writes the page.

    Args:
        path: where it goes; None is check.html in the current folder.
        rows: the first rows of each set that are shown.
        template: `data.gold_template`.

    Raises:
        ConfigError: there is no such folder, or a file at `path` that is not such a page.
    """

    def __init__(
        self,
        path: str | None,
        processor: Processor,
        specs: Sequence[RewardSpec],
        *,
        rows: int = ROWS,
        template: str | None = None,
    ) -> None:
        self.file = OutputFile("--page", NAME if path is None else path, WRITTEN_BY)
        self._processor, self._specs, self._rows, self._template = processor, specs, rows, template
        self._sets: dict[str, _Set] = {}
        self._bytes = 0

    def add(self, name: str, row: str, prompt: Prompt) -> None:
        """Take a row that can be used; `row` is what messages call it."""
        row = _file_and_line(row)
        of_set = self._sets.setdefault(name, _Set())
        of_set.lengths.append((len(prompt.token_ids), row))
        of_set.rows.append((row, *_digests(prompt)))
        if len(of_set.lengths) > self._rows:
            return
        if of_set.left_out or (of_set.shown and self._bytes >= MOST_BYTES):
            of_set.left_out += 1
            return
        shown = self._describe(row, prompt)
        size = sum(len(image["uri"]) for image in shown["images"])
        size += sum(len(text) for text, _ in shown["prompt"])
        size += sum(len(name) + len(text) for name, text in (*shown["gold"], *shown["columns"]))
        if of_set.shown and self._bytes + size > MOST_BYTES:
            of_set.left_out += 1
            return
        self._bytes += size
        of_set.shown.append(shown)

    def refuse(self, name: str, row: str, message: str) -> None:
        """Take a row that a run would stop at or leave out."""
        message = message.removeprefix(f"{row}: ")
        self._sets.setdefault(name, _Set()).refused.append((_file_and_line(row), message))

    def write(self) -> str:
        """Write the page; a sentence that says where it is and what it shows."""
        from jinja2 import Environment, StrictUndefined

        environment = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["visible"] = printable
        template = environment.from_string(
            Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
        )
        html = template.render(self.gather())
        self.file.write(html)
        shown = sum(len(of_set.shown) for of_set in self._sets.values())
        return f"page: {self.file.path.resolve()} shows {shown} rows ({len(html.encode()) / 1e6:.1f} MB)"

    def gather(self) -> dict[str, Any]:
        """Everything that the template shows."""
        return {
            "mark": WRITTEN_BY.decode(),
            "sets": [
                {
                    "name": name,
                    "usable": len(of_set.lengths),
                    "shown": of_set.shown,
                    "left_out": of_set.left_out,
                    "megabytes": MOST_BYTES // 1_000_000,
                    "refused": of_set.refused[:LISTED],
                    "refused_count": len(of_set.refused),
                    "lengths": describe_lengths(of_set.lengths),
                }
                for name, of_set in self._sets.items()
            ],
            "overlaps": [
                shared
                for name in self._sets
                if name != "train" and (shared := self._overlap(name)) is not None
            ],
        }

    def _overlap(self, name: str) -> dict[str, Any] | None:
        """Rows of a set that are also rows of the training set; None without both."""
        if "train" not in self._sets or not self._sets[name].rows:
            return None
        whole: dict[bytes, str] = {}
        images: dict[bytes, str] = {}
        for row, digest, image_digest in self._sets["train"].rows:
            whole.setdefault(digest, row)
            if image_digest is not None:
                images.setdefault(image_digest, row)
        rows = self._sets[name].rows
        same = [(row, whole[digest]) for row, digest, _ in rows if digest in whole]
        seen = [
            (row, images[image])
            for row, digest, image in rows
            if image is not None and image in images and digest not in whole
        ]
        return {
            "name": name,
            "rows": len(rows),
            "same": len(same),
            "examples": same[:EXAMPLES],
            "images": len(seen),
            "image_examples": seen[:EXAMPLES],
        }

    def _describe(self, row: str, prompt: Prompt) -> dict[str, Any]:
        """One row, ready for the template."""
        marks, notes = gold_marks(self._specs, prompt)
        images = prompt.engine_prompt.images
        text = len(prompt.engine_prompt.token_ids) - len(images)
        gold = [(spec.name, gold_text(spec, prompt, self._template)) for spec in self._specs]
        return {
            "row": row,
            "images": [
                {
                    **encode_image(image),
                    "width": image.width,
                    "height": image.height,
                    "original": prompt.sample.images[at].size
                    if at < len(prompt.sample.images)
                    else image.size,
                    "marks": [
                        {
                            "label": mark.label,
                            "point": len(mark.points) == 1,
                            "x": f"{mark.points[0][0]:.2f}",
                            "y": f"{mark.points[0][1]:.2f}",
                            "points": " ".join(f"{x:.2f},{y:.2f}" for x, y in mark.points),
                            "text": _written(mark),
                        }
                        for mark in marks
                        if mark.image == at
                    ],
                }
                for at, image in enumerate(images)
            ],
            "notes": notes,
            "tokens": {"text": text, "image": len(prompt.token_ids) - text, "all": len(prompt.token_ids)},
            "prompt": list(prompt_pieces(self._processor, prompt.engine_prompt.token_ids)),
            "gold": [(name, _short(answer)) for name, answer in gold if answer is not None],
            "columns": [(name, _short(_plain(value))) for name, value in prompt.sample.columns.items()],
        }


def describe_lengths(lengths: Sequence[tuple[int, str]]) -> dict[str, Any] | None:
    """The lengths of prompts in tokens: least, mean, most, the longest row, and bars of a histogram in shares of the
    highest; None without rows."""
    if not lengths:
        return None
    tokens = [length for length, _ in lengths]
    low, high = min(tokens), max(tokens)
    width = max(1, -(-(high - low + 1) // BARS))
    counts = [0] * ((high - low) // width + 1)
    for length in tokens:
        counts[(length - low) // width] += 1
    return {
        "low": low,
        "mean": round(sum(tokens) / len(tokens)),
        "high": high,
        "longest": next(row for length, row in lengths if length == high),
        "bars": [
            {
                "share": count / max(counts),
                "count": count,
                "low": low + i * width,
                "high": low + (i + 1) * width - 1,
            }
            for i, count in enumerate(counts)
        ],
    }


def prompt_pieces(processor: Any, token_ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a special token) of a prompt, from its ids; at most LONGEST_TEXT characters.

    Of a processor of the user's own without a tokenizer of transformers, the text without special tokens.
    """
    tokenizer: Any = getattr(processor, "tokenizer", None)
    if not hasattr(tokenizer, "added_tokens_decoder"):
        yield _cut(processor.decode(token_ids)), False
        return
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    length = 0
    for is_special, run in groupby(token_ids, key=special.__contains__):
        ids = list(run)
        texts = [[one] for one in ids] if is_special else [ids]
        for one in texts:
            text = tokenizer.decode(one, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield _cut(text, LONGEST_TEXT - length), is_special
            length += len(text)
            if length >= LONGEST_TEXT:
                return


def encode_image(image: Image) -> dict[str, str]:
    """A data URI of an image, as PNG or, where that is large, as JPEG; `form` says which."""
    data = _encoded(image, "PNG")
    form = "PNG"
    if len(data) > LARGEST_PNG:
        data, form = _encoded(image, "JPEG", quality=90, subsampling=0), "JPEG"
    return {"uri": f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}", "form": form}


def _encoded(image: Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def _digests(prompt: Prompt) -> tuple[bytes, bytes | None]:
    """Digests of the text and the images as the model sees them, and of the images alone; None without images."""
    images = hashlib.blake2b(digest_size=16)
    for image in prompt.engine_prompt.images:
        images.update(f"{image.mode} {image.size} ".encode() + image.tobytes())
    whole = images.copy()
    whole.update(b"|" + ",".join(map(str, prompt.engine_prompt.token_ids)).encode())
    return whole.digest(), images.digest() if prompt.engine_prompt.images else None


def _plain(value: Any) -> str:
    """A column's value as text, of which bytes and images are only named."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_name_of)
    except (TypeError, ValueError):  # keys that are no text
        return _name_of(value)


def _name_of(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def _written(mark: Mark) -> str:
    """The numbers of a mark: of a box those of two corners."""
    points = mark.points
    if len(points) == 4 and points == tuple(
        (points[i][0], points[j][1]) for i, j in ((0, 0), (2, 0), (2, 2), (0, 2))
    ):
        points = (points[0], points[2])
    return f"[{', '.join(f'{number:.5g}' for point in points for number in point)}]"


def _file_and_line(row: str) -> str:
    return row.rsplit("/", 1)[-1]


def _short(text: str) -> str:
    return _cut(text, LONGEST_VALUE)


def _cut(text: str, limit: int = LONGEST_TEXT) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
