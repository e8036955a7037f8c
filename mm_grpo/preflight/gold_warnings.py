"""Warnings of golds that look like no answer, which `mm-grpo check` and the start of a run log.

Any gold scores 1 against itself, also one that no model would write: a mapping kept as text, a chain of thought, a box
in shares of the image that counts as pixels. `KINDS` lists what the golds of built-ins may be; how a user's own reward
reads its column is not known. To add a kind: a line there.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mm_grpo.data.base import SAMPLED_ROWS, Rows
from mm_grpo.data.columns import brief
from mm_grpo.errors import DataError
from mm_grpo.messages import messages_text
from mm_grpo.rewards.builtins.answers import boxed, final_part, gold_texts, normalise, text_list
from mm_grpo.rewards.builtins.boxes import Box, Frame
from mm_grpo.rewards.builtins.clicking import bounds
from mm_grpo.rewards.builtins.temporal import gold_interval
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import GOLD_COLUMNS, builtin_name, gold_polygons

log = logging.getLogger(__name__)
MAX_WORDS = 40  # of a short answer
MAX_ROWS = 20_000  # of a source, looked at before a run: a second

_LIST_WORDS = re.compile(
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
_YES_NO = re.compile(r"(?i)(?:^|[.!?>\n] ?)(?:is|are|was|were|do|does|did|has|have|can|will)\b[^?]*\?")
_MARK = r"[.):\]]"  # behind the letter of an option
_OPTION = re.compile(
    rf"(?m)(?:^|[\s(\[])([A-Z]){_MARK}\s{{0,4}}(\S.{{0,300}}?)(?=\s{{1,4}}[(\[]?[A-Z]{_MARK}|\s{{0,4}}$)"
)


class Gold(NamedTuple):
    """A row's gold under a built-in."""

    builtin: str
    value: Any
    text: str
    """The column's text; "" if it holds something else."""
    parts: Sequence[str]
    """What the built-in reads of the right answers, one at least."""
    options: Mapping[str, Any]
    """The row's columns, and the arguments that the config sets."""
    prompt: str


def _asks(gold: Gold) -> bool:
    return _LIST_WORDS.search(gold.prompt) is not None


def _is_structure(gold: Gold) -> bool:
    is_list = _STRUCTURE.fullmatch(gold.text) is not None and not text_list(gold.text)
    return is_list and (_MESSAGE.search(gold.text) is not None or not _asks(gold))


def _is_long(gold: Gold) -> bool:
    return all(len(part) > MAX_WORDS and len(_WORD.findall(part)) > MAX_WORDS for part in gold.parts)


def _is_boolean(gold: Gold) -> bool:
    return isinstance(gold.value, bool) and not re.search(r"(?i)\b(true|false)\b", gold.prompt)


def _is_bit(gold: Gold) -> bool:
    names_it = re.search(r"\b[01]\b|how many", gold.prompt) is not None
    return gold.parts[0] in ("0", "1") and not names_it and _YES_NO.search(gold.prompt) is not None


def _is_other_option(gold: Gold) -> bool:
    """Return True if the prompt shows options, and the gold names one in another way than it asks for."""
    prompt, golds = gold.prompt, [normalise(part) for part in gold.parts]
    asks_letter = re.search(r"\bletters?\b", prompt, re.I) is not None
    if max(map(len, golds)) > 4 and not asks_letter:
        return False  # most rows, in little time
    golds = [re.sub(r"^\(?[a-z][.):] (?=\w)", "", text) for text in golds]  # "A. cat" is the option's text
    lettered, column = dict(_OPTION.findall(prompt)), gold.options.get("choices", gold.options.get("options"))
    shows_letters = {"A", "B"} <= lettered.keys()
    texts = [n for n in column if isinstance(n, str)] if isinstance(column, list | tuple) else column
    listed = gold_texts(texts) if isinstance(texts, str | list) else ()
    names = [normalise(name) for name in (lettered.values() if shows_letters else listed)]
    if len(names) < 2:
        return False
    if all(text.isdecimal() and len(text) < 3 for text in golds):
        marked = any(re.search(rf"(?<![\w.]){text}\s?{_MARK}", prompt) for text in golds)
        return not marked and not re.search(r"\d", " ".join(names)) and max(map(int, golds)) <= len(names)
    if all(re.fullmatch(r"\W?[a-z]\W?", text) for text in golds):
        marked = re.search(r"(?<![^\W_])B(?![^\W_])", prompt) is not None
        return not marked and all(len(name) > 1 and name in normalise(prompt) for name in names)
    return shows_letters and asks_letter and set(golds) <= set(names)


def _boxes(gold: Gold) -> list[Box]:
    """Return the gold boxes that count as pixels; [] if the reward cannot read them, and then raises.

    An interval of seconds is a box from 0 to 1.
    """
    with suppress(ValueError, TypeError, OverflowError):
        if gold.options.get("gold_space") == "normalized":
            return []
        if gold.builtin == "temporal_iou":
            start, end = gold_interval(gold.value, None)
            return [(start, 0, end, 1)]
        return [bounds(shape) for shape in gold_polygons(gold.builtin, gold.options, Frame())]
    return []


def _is_share(gold: Gold) -> bool:
    numbers = [number for box in _boxes(gold) for number in box]
    return max(map(abs, numbers), default=2) <= 1 and any(number % 1 for number in numbers)


def _is_small(gold: Gold) -> bool:
    sizes = [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in _boxes(gold)]
    return max(sizes, default=4) < 4 and gold.options.get("reach") is None


TEXTS = {
    "lists": "are lists kept as text, any element of which is right, but some rows have none or the prompt asks for a "
    "list: let the column hold lists of right answers; one that is itself the answer is written [text]",
    "structures": "are a mapping, messages or a list, which no completion equals: let the column hold the answer alone "
    "or a list of right answers; iou, box_match and clicking read boxes",
    "reasoning": f"hold reasoning, its tags or over {MAX_WORDS} words: let the column hold the final answer alone",
    "missing": "are nan, <NA> or NaT, which pandas writes for a missing value: make them null",
    "booleans": 'are booleans, which only "True" and "False" equal: ask for these, or let the column hold texts',
    "bits": 'are 0 or 1, which no "yes" or "no" equals: ask for these, or let the column hold texts',
    "floats": 'are texts such as "3.0", which "3" does not equal: use numeric or count, or write 3',
    "letters": "are single letters, and any text with such a word is right, as in 'a cat': use the reward choice",
    "options": "are the number, letter or text of an option, and the prompt asks for another of these: let them agree",
    "small": "are smaller than 4 pixels or a second: if they are shares of image or video, set gold_space: normalized",
    "tokens": "are longer than rollout.max_completion_length tokens, as data.gold_template writes them: raise it",
    "alike": "to say it always would be right there: add other rows, or leave out rows whose gold is missing",
}
_COMPARED = ("exact_match", "contains", "anls", "chart_relaxed")
_LISTED = (*_COMPARED, "math")
_READ_BOXED = ("exact_match", "numeric", "count", "math")
_SHORT = (*_READ_BOXED, "choice", "chart_relaxed")
_WRITTEN = (*_LISTED[:3], "edit_similarity", "math")  # a shorter text is not as right
KINDS: list[tuple[str, Sequence[str], float, float, Callable[[Gold], bool]]] = [
    ("lists", _LISTED, 0, 0.999999, lambda gold: bool(text_list(gold.text))),
    ("lists", _LISTED, 0.5, 1, lambda gold: bool(text_list(gold.text)) and _asks(gold)),
    ("structures", _LISTED, 0, 1, _is_structure),
    ("structures", _COMPARED, 0.5, 1, lambda gold: bool(_NUMBERS.fullmatch(gold.text)) and not _asks(gold)),
    ("reasoning", _COMPARED, 0, 1, lambda gold: all(map(_TAGS.search, gold.parts))),
    ("reasoning", _SHORT, 0, 1, _is_long),
    ("reasoning", ("anls",), 0.1, 1, _is_long),
    ("missing", (*_SHORT, *_WRITTEN), 0, 1, lambda gold: {*gold.parts} <= {"nan", "<NA>", "NaT"}),
    ("booleans", (*_SHORT, *_WRITTEN), 0, 1, _is_boolean),
    ("bits", _LISTED, 0.5, 1, _is_bit),
    ("floats", _COMPARED[:2], 0.5, 1, lambda gold: re.fullmatch(r"-?\d+\.0+", gold.parts[0]) is not None),
    ("letters", ("contains",), 0.5, 1, lambda gold: all(re.fullmatch(r"\W?[A-Z]\W?", p) for p in gold.parts)),
    ("options", ("exact_match", "anls", "choice"), 0.5, 1, _is_other_option),
    ("small", tuple(GOLD_COLUMNS), 0, 1, _is_share),
    ("small", tuple(GOLD_COLUMNS), 1, 1, _is_small),
    ("small", ("temporal_iou",), 1, 1, _is_share),
]
"""Name in `TEXTS`, built-ins, least and largest share of a source's golds to warn of it, and the test of a gold."""


class GoldWarnings:
    """Collector of golds: `add` the rows, then read `sentences`.

    With a `tokenizer`, right answers that are written as in `template` may have `limit` tokens.
    """

    def __init__(
        self, specs: Iterable[RewardSpec], template: str | None = None, tokenizer: Any = None, limit: int = 0
    ) -> None:
        self._template, self._tokenizer, self._limit = template or "{gold}", tokenizer, limit
        self._kinds = [*KINDS, ("tokens", _WRITTEN, 0, 1, self._is_too_long)]
        names = {name for _, rewards, *_ in self._kinds for name in rewards}
        self.rewards = [(spec, name) for spec in specs if (name := builtin_name(spec)) in names]
        self._values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        """Golds by source and reward."""
        self._counts: dict[tuple[tuple[str, str], int], tuple[int, str]] = {}
        """Number of golds of a kind, and the first one with its row."""

    def add(
        self, source: str, row: str, messages: Iterable[Mapping[str, Any]], columns: Mapping[str, Any]
    ) -> None:
        """Add the golds of one row; `row` is its name."""
        prompt = messages_text(messages)
        for spec, builtin in self.rewards:
            value, key = columns.get(spec.needs[0]), (source, spec.name)
            if spec.needs[0] in spec.bound or not spec.applies_to(columns):
                continue
            parts = []
            with suppress(TypeError):  # the reward refuses it
                parts = [final_part(text).strip() for text in gold_texts(value)]
            if not parts:
                continue
            if builtin in _READ_BOXED:
                parts = [boxed(part) or part for part in parts]
            text = value.strip() if isinstance(value, str) else ""
            gold = Gold(builtin, value, text, parts, {**columns, **spec.bound}, prompt)
            self._values[key][str(value)[:200]] += 1
            for number, (_, rewards, *_, predicate) in enumerate(self._kinds):
                if builtin in rewards and predicate(gold):
                    count, first = self._counts.get((key, number), (0, f"{row}: {brief(value)}"))
                    self._counts[key, number] = count + 1, first

    def sentences(self, *, alike: bool = True) -> list[str]:
        """Return a sentence for each kind, reward and source; with `alike` also about golds that are mostly equal."""
        sentences: dict[tuple[tuple[str, str], str], str] = {}
        for (key, number), (count, first) in self._counts.items():
            rows, (kind, _, least, most, _) = self._values[key].total(), self._kinds[number]
            if least * rows <= count <= most * rows:
                sentences[key, kind] = f"{count} of {rows}, the first {first}, {TEXTS[kind]}"
        for key, values in self._values.items() if alike else ():
            rows, (value, count), distinct = values.total(), values.most_common(1)[0], len(values)
            # one source of a mixture may be one class
            constant = distinct == 1 and rows >= 8 and "/" not in key[0]
            if constant or (distinct > 1 and rows >= 20 and count > rows * (0.75 if distinct == 2 else 0.5)):
                sentences[key, "alike"] = f"{count} of {rows} are {brief(value)}, and {TEXTS['alike']}"
        items = sentences.items()
        return [f"{source}, golds of the reward {name!r}: {text}" for ((source, name), _), text in items]

    def _is_too_long(self, gold: Gold) -> bool:
        texts = [self._template.replace("{gold}", part) for part in gold.parts]
        if self._tokenizer is None or any(len(text.encode()) <= self._limit for text in texts):
            return False  # a token holds a byte at least
        token_ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return all(len(ids) > self._limit for ids in token_ids)


def warn_of_golds(sets: Iterable[Rows], specs: Iterable[RewardSpec]) -> None:
    """Log warnings of the golds in the sets. Of a source MAX_ROWS are looked at, SAMPLED_ROWS if not in memory."""
    golds = GoldWarnings(specs)
    sources = [source for rows in sets for source in rows.sources]
    for source in sources if golds.rewards else ():  # no row is read for nothing
        for index in source.spaced(MAX_ROWS if source.in_memory else SAMPLED_ROWS):
            with suppress(DataError):
                fields = source.fields(index)
                golds.add(source.name, source.row_name(index), fields.messages, fields.columns)
    for sentence in golds.sentences():
        log.warning("%s", sentence)
