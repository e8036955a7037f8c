"""The page of `mm-grpo check --page`: what the model sees of the first rows.

Images at the size that the processor gives them, with the gold boxes and points of run/overlays.py drawn over them; the
prompt decoded from the very ids that the engine is sent; counts of tokens; rows that are refused. `CheckPage`
is given rows while they are checked, so that nothing is made twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mm_grpo.files import OutputFile
from mm_grpo.pages.page import GENERATOR, Picture, as_text, cut, encode_image, render
from mm_grpo.run.overlays import gold_overlays

if TYPE_CHECKING:
    from mm_grpo.processors.base import Processor
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Prompt

TITLE = "What the model sees – mm_grpo check"
MAX_ROWS = 20
MOST_BYTES = 24_000_000
"""Of the images and texts of a page's rows; those after that are not shown."""
LARGEST_PNG = 600_000
"""Bytes of an image that is shown as PNG, pixel by pixel as the model gets it; a larger one is shown as JPEG."""
LONGEST_TEXT = 20_000
"""Characters of one prompt on the page."""
LONGEST_VALUE = 400
LISTED = 50
"""Refused rows of a set that are listed; the others are counted."""
Answer = Callable[["RewardSpec", "Prompt"], str | None]


@dataclass
class _Set:
    """One set: lengths of its prompts with their rows, rows that are refused, rows that are shown."""

    lengths: list[tuple[int, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0


class CheckPage:
    """Collects the rows of a check, and writes the page.

    Args:
        path: where it goes; None where it is not written.
        rows: the first rows of each set that are shown.
        answer: the right answer of a row for a reward, None where it has none.

    Raises:
        ConfigError: there is no such folder, or a file at `path` that is no page of ours.
    """

    def __init__(
        self,
        path: str | None,
        processor: Processor,
        specs: Sequence[RewardSpec],
        *,
        rows: int = MAX_ROWS,
        answer: Answer = lambda spec, prompt: None,
    ) -> None:
        self.file = None if path is None else OutputFile("--page", path, GENERATOR)
        self._processor, self._specs, self._rows, self._answer = processor, specs, rows, answer
        self._sets: dict[str, _Set] = {}
        self._pictures: dict[str, Picture] = {}
        self._bytes = 0
        self.shared: Sequence[str] = ()  # sentences about rows that stand in several sets

    def add(self, name: str, row: str, prompt: Prompt) -> None:
        """Take a row that can be used; `row` is what messages call it."""
        of_set = self._sets.setdefault(name, _Set())
        of_set.lengths.append((len(prompt.token_ids), row))
        if len(of_set.lengths) > self._rows:
            return
        shown, pictures = self._describe(row, prompt) if not of_set.left_out else ({}, {})
        size = sum(len(picture.uri) for picture in pictures.values()) + len(
            json.dumps(shown, ensure_ascii=False)
        )
        if of_set.left_out or (of_set.shown and self._bytes + size > MOST_BYTES):
            of_set.left_out += 1
            return
        self._bytes += size
        self._pictures |= pictures
        of_set.shown.append(shown)

    def refuse(self, name: str, row: str, message: str) -> None:
        """Take a row that a run would stop at or leave out."""
        message = message.removeprefix(f"{row}: ")
        self._sets.setdefault(name, _Set()).refused.append((row, message))

    def write(self) -> str:
        """Write the page; a sentence that says where it is and what it shows, "" where it is not written."""
        if self.file is None:
            return ""
        html = render(TITLE, self.gather(), self._pictures)
        self.file.write(html)
        shown = sum(len(of_set.shown) for of_set in self._sets.values())
        return f"page: {self.file.path.resolve()} shows {shown} rows ({len(html.encode()) / 1e6:.1f} MB)"

    def gather(self) -> dict[str, Any]:
        """Everything that the page shows."""
        for of_set in self._sets.values():
            _shorten(of_set)
        sets = [
            {
                "name": name,
                "usable": len(of_set.lengths),
                "shown": of_set.shown,
                "left_out": of_set.left_out,
                "refused": of_set.refused[:LISTED],
                "refused_count": len(of_set.refused),
                "lengths": describe_lengths(of_set.lengths),
            }
            for name, of_set in self._sets.items()
        ]
        megabytes = MOST_BYTES // 1_000_000
        return {"kind": "check", "megabytes": megabytes, "sets": sets, "shared": list(self.shared)}

    def _describe(self, row: str, prompt: Prompt) -> tuple[dict[str, Any], dict[str, Picture]]:
        """One row as the page holds it, and its pictures."""
        overlays, notes = gold_overlays(self._specs, prompt)
        images, originals = prompt.engine_prompt.images, prompt.sample.images
        pictures: dict[str, Picture] = {}
        shown = []
        for at, image in enumerate(images):
            uri, form = encode_image(image, LARGEST_PNG, quality=90, subsampling=0)
            name = str(len(self._pictures) + at)
            pictures[name] = Picture(image.width, image.height, uri)
            original = originals[at].size if at < len(originals) else image.size
            shown.append({"name": name, "original": original, "jpeg": form == "jpeg"})
        text = len(prompt.engine_prompt.token_ids) - len(images)
        answers = [(spec.name, self._answer(spec, prompt)) for spec in self._specs]
        columns = prompt.sample.columns.items()
        return {
            "row": row,
            "images": shown,
            "gold": [overlay.as_dict() for overlay in overlays],
            "notes": notes,
            "tokens": {"text": text, "image": len(prompt.token_ids) - text, "all": len(prompt.token_ids)},
            "prompt": list(prompt_pieces(self._processor, prompt.engine_prompt.token_ids)),
            "answers": [(name, cut(answer, LONGEST_VALUE)) for name, answer in answers if answer is not None],
            "columns": [(name, cut(as_text(value), LONGEST_VALUE)) for name, value in columns],
        }, pictures


def _shorten(of_set: _Set) -> None:
    """Leave the folder out of the names of rows that lie in one."""
    names = [*(row for _, row in of_set.lengths), *(row for row, _ in of_set.refused)]
    folder = os.path.commonprefix(names).rpartition("/")  # noqa: RUF071 - cut at a slash
    start = len(folder[0] + folder[1])
    of_set.lengths = [(length, row[start:]) for length, row in of_set.lengths]
    of_set.refused = [(row[start:], message) for row, message in of_set.refused]
    of_set.shown = [{**shown, "row": shown["row"][start:]} for shown in of_set.shown]


def describe_lengths(lengths: Sequence[tuple[int, str]]) -> dict[str, Any] | None:
    """The lengths of prompts in tokens: least, mean, most, and the longest row; None without rows."""
    if not lengths:
        return None
    tokens = [length for length, _ in lengths]
    high, longest = max(lengths, key=itemgetter(0))
    return {"low": min(tokens), "mean": round(sum(tokens) / len(tokens)), "high": high, "longest": longest}


def prompt_pieces(processor: Any, token_ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a special token) of a prompt, from its ids; at most LONGEST_TEXT characters.

    Of a processor of the user's own without a tokenizer of transformers, the text without special tokens.
    """
    tokenizer: Any = getattr(processor, "tokenizer", None)
    if not hasattr(tokenizer, "added_tokens_decoder"):
        yield cut(processor.decode(token_ids), LONGEST_TEXT), False
        return
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    length = 0
    for is_special, run in groupby(token_ids, key=special.__contains__):
        ids = list(run)
        for one in [[id_] for id_ in ids] if is_special else [ids]:
            text = tokenizer.decode(one, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield cut(text, LONGEST_TEXT - length), is_special
            length += len(text)
            if length >= LONGEST_TEXT:
                return
