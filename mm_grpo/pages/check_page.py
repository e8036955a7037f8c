"""Page of `mm-grpo check --page`: the first rows as the model sees them.

It shows images at the processor's size with gold boxes and points (run/overlays.py), reduced frames of videos, the
prompt decoded from the ids that the engine is sent, counts of tokens, and refused rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from mm_grpo.files import OutputFile
from mm_grpo.pages.page import FRAME, GENERATOR, PageImage, as_text, cut, encode_image, render
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import gold_overlays
from mm_grpo.types import Prompt

TITLE = "What the model sees – mm_grpo check"
MAX_ROWS = 20
MAX_BYTES = 24_000_000  # bytes of images and texts; rows behind this limit are not shown
MAX_PNG_BYTES = 600_000  # a larger image is shown as JPEG, not pixel by pixel
MAX_PROMPT = 20_000  # characters of a prompt
MAX_VALUE = 400  # characters of an answer or a column's value
MAX_REFUSED = 50  # refused rows of a set that are listed; the others are counted
FindAnswer = Callable[["RewardSpec", "Prompt"], str | None]


@dataclass
class _SetPage:
    """Rows of one set."""

    lengths: list[tuple[int, str]] = field(default_factory=list)  # (tokens of the prompt, row)
    refused: list[tuple[str, str]] = field(default_factory=list)  # (row, message)
    entries: list[dict[str, Any]] = field(default_factory=list)  # rows on the page
    left_out: int = 0


class CheckPage:
    """Page of a check, to which rows are added one by one.

    `path` is the page's file, None if it is not written. `answer` returns a row's right answer for a reward. Raises
    ConfigError if `path` is in no folder or a foreign file.
    """

    def __init__(
        self, path: str | None, processor: Processor, specs: Sequence[RewardSpec], answer: FindAnswer
    ) -> None:
        self.file = None if path is None else OutputFile("--page", path, GENERATOR)
        self._processor, self._specs, self._answer = processor, specs, answer
        self._sets: dict[str, _SetPage] = {}
        self._images: dict[str, PageImage] = {}
        self._bytes = 0
        self.shared: Sequence[str] = ()  # sentences about rows that are in several sets

    def add(self, name: str, row: str, prompt: Prompt) -> None:
        """Add a usable row of the set `name`; `row` is its name in messages."""
        page = self._sets.setdefault(name, _SetPage())
        page.lengths.append((len(prompt.token_ids), row))
        if self.file is None or len(page.lengths) > MAX_ROWS:
            return
        entry, images = self._describe(row, prompt) if not page.left_out else ({}, {})
        size = sum(len(image.uri) for image in images.values()) + len(json.dumps(entry, ensure_ascii=False))
        if page.left_out or (page.entries and self._bytes + size > MAX_BYTES):
            page.left_out += 1
            return
        self._bytes += size
        self._images |= images
        page.entries.append(entry)

    def refuse(self, name: str, row: str, message: str) -> None:
        """Add a row that would stop a run, or that it would leave out."""
        message = message.removeprefix(f"{row}: ")
        self._sets.setdefault(name, _SetPage()).refused.append((row, message))

    def write(self) -> str:
        """Write the page; return a sentence with its path, "" if it is not written."""
        if self.file is None:
            return ""
        html = render(TITLE, self.gather(), self._images)
        self.file.write(html)
        count = sum(len(page.entries) for page in self._sets.values())
        return f"page: {self.file.path.resolve()} shows {count} rows ({len(html.encode()) / 1e6:.1f} MB)"

    def gather(self) -> dict[str, Any]:
        """Return the data of the page."""
        for page in self._sets.values():
            _shorten_rows(page)
        sets = [
            {
                "name": name,
                "usable": len(page.lengths),
                "shown": page.entries,
                "left_out": page.left_out,
                "refused": page.refused[:MAX_REFUSED],
                "refused_count": len(page.refused),
                "lengths": describe_lengths(page.lengths),
            }
            for name, page in self._sets.items()
        ]
        megabytes = MAX_BYTES // 1_000_000
        return {"kind": "check", "megabytes": megabytes, "sets": sets, "shared": list(self.shared)}

    def _describe(self, row: str, prompt: Prompt) -> tuple[dict[str, Any], dict[str, PageImage]]:
        """Return the data of one row, and its images by name."""
        overlays, notes = gold_overlays(self._specs, prompt)
        images, originals = prompt.engine_prompt.images, prompt.sample.images
        page_images: dict[str, PageImage] = {}
        entries = []
        for index, image in enumerate(images):
            uri, form = encode_image(image, MAX_PNG_BYTES, quality=90, subsampling=0)
            name = str(len(self._images) + index)
            page_images[name] = PageImage(image.width, image.height, uri)
            original = originals[index].size if index < len(originals) else image.size
            entries.append({"name": name, "original": original, "jpeg": form == "jpeg"})
        videos = []
        for video in prompt.engine_prompt.videos:
            names = [str(len(self._images) + len(page_images) + index) for index in range(len(video.frames))]
            frames = (PageImage.reduced(frame, *FRAME) for frame in video.frames)
            page_images |= zip(names, frames, strict=True)
            videos.append({"frames": names, "times": video.times})
        text = len(prompt.engine_prompt.token_ids) - len(prompt.engine_prompt.media)
        answers = [(spec.name, self._answer(spec, prompt)) for spec in self._specs]
        columns = prompt.sample.other_columns.items()
        return {
            "row": row,
            "images": entries,
            "videos": videos,
            "gold": [overlay.as_dict() for overlay in overlays],
            "notes": notes,
            "tokens": {"text": text, "media": len(prompt.token_ids) - text, "all": len(prompt.token_ids)},
            "prompt": list(prompt_pieces(self._processor, prompt.engine_prompt.token_ids)),
            "answers": [(name, cut(answer, MAX_VALUE)) for name, answer in answers if answer is not None],
            "columns": [(name, cut(as_text(value), MAX_VALUE)) for name, value in columns],
        }, page_images


def _shorten_rows(page: _SetPage) -> None:
    """Remove the folder that the names of all rows of a set begin with."""
    names = [*(row for _, row in page.lengths), *(row for row, _ in page.refused)]
    folder = os.path.commonprefix(names).rpartition("/")  # noqa: RUF071 - cut at a slash
    start = len(folder[0] + folder[1])
    page.lengths = [(length, row[start:]) for length, row in page.lengths]
    page.refused = [(row[start:], message) for row, message in page.refused]
    page.entries = [{**entry, "row": entry["row"][start:]} for entry in page.entries]


def describe_lengths(lengths: Sequence[tuple[int, str]]) -> dict[str, Any] | None:
    """Return the least, mean and largest length of prompts in tokens, and the longest row; None without rows."""
    if not lengths:
        return None
    tokens = [length for length, _ in lengths]
    high, longest = max(lengths, key=itemgetter(0))
    return {"low": min(tokens), "mean": round(sum(tokens) / len(tokens)), "high": high, "longest": longest}


def prompt_pieces(processor: Any, token_ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Decode a prompt into pieces (text, True for a special token), at most MAX_PROMPT characters."""
    tokenizer: Any = getattr(processor, "tokenizer", None)
    # a processor of the user's own need not have a tokenizer of transformers
    if not hasattr(tokenizer, "added_tokens_decoder"):
        yield cut(processor.decode(token_ids), MAX_PROMPT), False
        return
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    length = 0
    for is_special, run in groupby(token_ids, key=special.__contains__):
        ids = list(run)
        for piece in [[id_] for id_ in ids] if is_special else [ids]:
            text = tokenizer.decode(piece, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield cut(text, MAX_PROMPT - length), is_special
            length += len(text)
            if length >= MAX_PROMPT:
                return
