"""Warnings of golds that look like no answer, which `mm-grpo check` and the start of a run log.

Any gold scores 1 against itself, also one that no model would write: a mapping kept as text, a chain of thought, a box
in shares of the image that counts as pixels. `KINDS` lists what the golds of built-ins may be; how a user's own reward
reads its column is not known. To add a kind: a line there, and a condition in `_text_kinds` or `_box_kinds`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mm_grpo.data.base import SAMPLED_ROWS, Rows
from mm_grpo.data.columns import brief
from mm_grpo.errors import DataError
from mm_grpo.rewards.arguments import content_text
from mm_grpo.rewards.builtins.answers import boxed, final_part, gold_texts, normalise, text_list
from mm_grpo.rewards.builtins.boxes import Frame
from mm_grpo.rewards.builtins.clicking import bounds
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import GOLD_COLUMNS, builtin_name, gold_polygons

log = logging.getLogger(__name__)
MAX_WORDS = 40  # of a short answer
MAX_ROWS = 20_000  # of a source, looked at before a run: a second
CLASSES = ("yes", "no", "true", "false")  # most golds of an honest set may be one of these
_COMPARED = ("exact_match", "contains", "anls", "chart_relaxed")
_READ_BOXED = ("exact_match", "numeric", "count", "math")
_SHORT = (*_READ_BOXED, "choice", "chart_relaxed", "anls")
_WRITTEN = ("exact_match", "contains", "anls", "edit_similarity", "math")  # a shorter text is not as right
_REWARDS = {*_SHORT, *_WRITTEN, *GOLD_COLUMNS}

_LISTS = (
    "are lists kept as text, any element of which is right, but some rows have none or the prompt asks for a list: let "
    "the column hold lists of right answers; one that is itself the answer is written [text]"
)
_STRUCTURES = (
    "are a mapping, messages or a list, which no completion equals: let the column hold the answer alone or a list of "
    "right answers; iou, box_match and clicking read boxes"
)
_REASONING = f"hold reasoning, its tags or over {MAX_WORDS} words: let the column hold the final answer alone"
_SMALL = "are smaller than 4 pixels: if they are shares of the image's sides, set gold_space: normalized"
_OPTIONS = (
    "are the number, letter or text of an option, and the prompt asks for another of these: let them agree"
)
_TOKENS = "are longer than rollout.max_completion_length tokens, as data.gold_template writes them: raise it"
KINDS = {
    "lists": (0.0, 0.999999, _LISTS),
    "lists asked for": (0.5, 1.0, _LISTS),
    "structures": (0.0, 1.0, _STRUCTURES),
    "numbers": (0.5, 1.0, _STRUCTURES),
    "reasoning": (0.0, 1.0, _REASONING),
    "long": (0.1, 1.0, _REASONING),
    "shares": (0.0, 1.0, _SMALL),
    "small": (1.0, 1.0, _SMALL),
    "options": (0.5, 1.0, _OPTIONS),
    "tokens": (0.0, 1.0, _TOKENS),
}
"""Kind -> least and largest share of a source's golds to warn of it, and what to say."""

_ASKS = re.compile(
    r"(?i)\b(json|python|code|programs?|prints?|lists?|arrays?|tuples?|dict\w*|vector|matrix)\b|\[|\{ ?[\"']"
)
_STRUCTURE = re.compile(
    r"""(?s)\{\s*["'][^"']{1,80}["']\s*:.*\}|\[\s*\{.*\}\s*\]|\[\s*\]|\[[\[(\s]*["'].*\]"""
)
_MESSAGE = re.compile(r"""["'](?:role|from)["']\s*:""")
_NUMBERS = re.compile(r"\[[-+\d.,\s\[\]eE]*\d[\s\]]*\]")
_TAG = "think|thinking|thoughts?|reason|reasoning|rationale|analysis|conclusion|solution|answer"
_TAGS = re.compile(rf"(?i)</?(?:{_TAG})>|<\|(?:begin|end)_of_\w{{1,20}}\|>|\\boxed\{{|(?:^|\s)####\s")
_WORD = re.compile(r"[\u3040-\u9fff]{2}|(?<!\\)\b[^\W\d_]{2,}")  # of a script without spaces two characters
_MARK = r"[.):\]]"  # behind the letter of an option
_OPTION = re.compile(
    rf"(?m)(?:^|[\s(\[])([A-Z]){_MARK}\s{{0,4}}(\S.{{0,300}}?)(?=\s{{1,4}}[(\[]?[A-Z]{_MARK}|\s{{0,4}}$)"
)


class GoldWarnings:
    """Collector of golds: `add` the rows, then read `sentences`.

    With a `tokenizer`, right answers that are written as in `template` may have `limit` tokens.
    """

    def __init__(
        self, specs: Iterable[RewardSpec], template: str | None = None, tokenizer: Any = None, limit: int = 0
    ) -> None:
        self._rewards = [(spec, name) for spec in specs if (name := builtin_name(spec)) in _REWARDS]
        self._template, self._tokenizer, self._limit = template or "{gold}", tokenizer, limit
        self._values: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
        """Golds by source, reward and built-in."""
        self._kinds: dict[tuple[tuple[str, str, str], str], tuple[int, str]] = {}
        """Number of golds of a kind, and the first one with its row."""

    def add(
        self, source: str, row: str, messages: Iterable[Mapping[str, Any]], columns: Mapping[str, Any]
    ) -> None:
        """Add the golds of one row; `row` is its name."""
        prompt = "\n".join(content_text(message["content"]) for message in messages)
        for spec, builtin in self._rewards:
            column, options = spec.needs[0], {**columns, **spec.bound}
            if column in spec.bound or not spec.applies_to(columns):
                continue
            value, kinds = columns[column], _box_kinds if builtin in GOLD_COLUMNS else self._text_kinds
            if not str(value).strip() or (str(value) == "[]" and not isinstance(value, str)):
                continue
            key = source, spec.name, str(builtin)
            self._values[key][str(value)[:200]] += 1
            for kind in kinds(str(builtin), value, options, prompt):
                count, first = self._kinds.get((key, kind), (0, f"{row}: {brief(value)}"))
                self._kinds[key, kind] = count + 1, first

    def sentences(self, *, alike: bool = True) -> list[str]:
        """Return a sentence for each kind, reward and source; with `alike` also about golds that are mostly equal."""
        sentences: dict[tuple[Any, str], str] = {}
        for (key, kind), (count, first) in self._kinds.items():
            rows, (least, most, text) = self._values[key].total(), KINDS[kind]
            if least * rows <= count <= most * rows:
                sentences[key, text] = f"{_start(key)}: {count} of {rows}, the first {first}, {text}"
        for key, values in self._values.items() if alike else ():
            rows, (value, count), distinct = values.total(), values.most_common(1)[0], len(values)
            # one source of a mixture may be one class
            constant = distinct == 1 and rows >= 8 and "/" not in key[0]
            skewed = distinct > 4 and rows >= 20 and 2 * count > rows and value.lower() not in CLASSES
            if constant or (skewed and key[2] != "count"):
                text = "to say it always would be right there: leave out rows whose gold is missing"
                sentences[key, ""] = f"{_start(key)}: {count} of {rows} are {brief(value)}, and {text}"
        return list(sentences.values())

    def _text_kinds(self, builtin: str, value: Any, options: Mapping[str, Any], prompt: str) -> Iterator[str]:
        is_text, items = isinstance(value, str), value if isinstance(value, list | tuple) else (value,)
        text = str(value).strip() if is_text or any(isinstance(item, Mapping) for item in items) else ""
        if text[:1] in ("[", "{", "(") and builtin in (*_COMPARED, "math"):
            asks = _ASKS.search(prompt) is not None
            if is_text and text_list(text):
                yield from ("lists", "lists asked for") if asks else ("lists",)
            elif _STRUCTURE.fullmatch(text) and not (asks and is_text and not _MESSAGE.search(text)):
                yield "structures"
                return
            elif _NUMBERS.fullmatch(text) and builtin != "math" and not asks:
                yield "numbers"
        texts = [str(value)] if builtin in ("choice", "edit_similarity") else gold_texts(value)
        parts = [final_part(text).strip() for text in texts]
        if builtin in _READ_BOXED:
            parts = [boxed(part) or part for part in parts]
        if not parts:
            return
        if builtin in _COMPARED and all(map(_TAGS.search, parts)):
            yield "reasoning"
        elif builtin in _SHORT and all(map(_is_long, parts)):
            yield "long" if builtin == "anls" else "reasoning"
        if builtin in ("exact_match", "anls", "choice") and _names_other_option(parts, options, prompt):
            yield "options"
        if self._tokenizer is not None and builtin in _WRITTEN and not any(map(self._fits, parts)):
            yield "tokens"

    def _fits(self, text: str) -> bool:
        text = self._template.replace("{gold}", text)
        if len(text.encode()) <= self._limit:  # a token holds a byte at least
            return True
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) <= self._limit


def _start(key: Sequence[str]) -> str:
    return f"{key[0]}, golds of the reward {key[1]!r}"


def _is_long(text: str) -> bool:
    return len(text) > MAX_WORDS and len(_WORD.findall(text)) > MAX_WORDS


def _names_other_option(texts: Sequence[str], options: Mapping[str, Any], prompt: str) -> bool:
    """Return True if the prompt shows options, and all texts name one in another way than it asks for."""
    if max(map(len, texts), default=0) > 4 and "letter" not in prompt.lower():
        return False  # most rows, in little time
    golds = [normalise(text) for text in texts]
    is_number = all(gold.isdecimal() and len(gold) < 3 for gold in golds)
    is_letter = all(re.fullmatch(r"\W?[a-z]\W?", gold) for gold in golds)
    lettered = dict(_OPTION.findall(prompt))
    column = options.get("choices", options.get("options"))
    listed = text_list(column) if isinstance(column, str) else column
    shows_letters = {"A", "B"} <= lettered.keys()
    shown = lettered.values() if shows_letters else listed if isinstance(listed, list | tuple) else ()
    names = [normalise(str(name)) for name in shown]
    if len(names) < 2:
        return False
    if is_number:
        marked = any(re.search(rf"(?<![\w.]){gold}\s?[.):\]]", prompt) for gold in golds)
        return not marked and not re.search(r"\d", " ".join(names)) and max(map(int, golds)) <= len(names)
    if is_letter:
        marked = re.search(r"(?<![^\W_])B(?![^\W_])", prompt) is not None
        return not marked and all(len(name) > 1 and name in normalise(prompt) for name in names)
    return shows_letters and re.search(r"\bletters?\b", prompt, re.I) is not None and set(golds) <= set(names)


def _box_kinds(builtin: str, value: Any, options: Mapping[str, Any], prompt: str) -> Iterator[str]:
    boxes = []
    with suppress(ValueError, TypeError, OverflowError):  # the reward raises them
        if options.get("gold_space") != "normalized":
            boxes = [bounds(shape) for shape in gold_polygons(builtin, options, Frame())]
    numbers = [number for box in boxes for number in box]
    if boxes and max(map(abs, numbers)) <= 1 and any(number % 1 for number in numbers):
        yield "shares"
    if boxes and all((x1 - x0) * (y1 - y0) < 4 for x0, y0, x1, y1 in boxes) and options.get("reach") is None:
        yield "small"


def warn_of_golds(sets: Iterable[Rows], specs: Iterable[RewardSpec]) -> None:
    """Log warnings of the golds in the sets. Of a source MAX_ROWS are looked at, SAMPLED_ROWS if not in memory."""
    golds = GoldWarnings(specs)
    for source in (source for rows in sets for source in rows.sources):
        for index in source.spaced(MAX_ROWS if source.in_memory else SAMPLED_ROWS):
            with suppress(DataError):
                fields = source.fields(index)
                golds.add(source.name, source.row_name(index), fields.messages, fields.columns)
    for sentence in golds.sentences():
        log.warning("%s", sentence)
