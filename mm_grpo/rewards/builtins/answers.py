"""The final answer in a completion, gold answers from a column, and the normal form in which both are compared.

Every reward of this package that reads text builds on these. Each function takes time linear in the length of
the text: models do produce 100,000 characters of the same bracket.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

Gold = str | int | float
Answer = Gold | Sequence[Gold | None] | None

_OPEN = re.compile(r"<answer>", re.IGNORECASE)
_CLOSE = re.compile(r"</answer>", re.IGNORECASE)
_THINK_END = re.compile(r"</think>", re.IGNORECASE)

_TRAILING = ".,;:!?。、，；：！？"
PLAIN = str.maketrans(
    {chr(n): chr(n - 0xFEE0) for n in range(0xFF01, 0xFF5F)} | dict(zip("−–’‘", "--''", strict=True))
)
"""ASCII for the full-width signs of Chinese and Japanese texts, and for a minus, a dash and an apostrophe."""
_QUOTED = r"""(?:u?"(?:[^"\\]|\\.)*+"|u?'(?:[^'\\]|\\.)*+')"""
_NUMBER = r"[-+]?\d[\d.]*"
_ITEM = re.compile(f"({_QUOTED})|({_NUMBER})|None|null|nan", re.DOTALL)
# no capturing group may stand in a possessive one: Python 3.11 fails on it
_LIST = re.compile(
    rf"[\[({{]\s*+(?:(?:{_QUOTED}|{_NUMBER}|None|null|nan)(?:\s*+,\s*+|\s++|(?=.\Z)))++.", re.DOTALL
)
_ARRAY = re.compile(r"(?:np\.|numpy\.)?array\((.*?)(?:,\s*dtype=[^,()]{1,20})?\)", re.DOTALL)
_MAX_LIST = 20_000  # characters of a text that is read as a list
_PAIRS = {'"': '"', "'": "'", "`": "`", "*": "*", "“": "”", "‘": "’", "«": "»"}


def final_part(text: str) -> str:
    """Return the inside of the last `<answer>` block (to the end of the text when it is not closed), else
    what follows the last `</think>`, else the whole text.

    >>> final_part("<think>4? no</think> <answer> 3 </answer>")
    ' 3 '
    """
    if tag := last_match(_OPEN, text):
        end = _CLOSE.search(text, tag.end())
        return text[tag.end() : end.start() if end else len(text)]
    tag = last_match(_THINK_END, text)
    return text[tag.end() :] if tag else text


def boxed(text: str) -> str | None:
    r"""Return the inside of the last closed `\boxed{...}`, with its nested braces; None without one.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    opening = "\\boxed{"
    stop = len(text)
    while (start := text.rfind(opening, 0, stop)) >= 0:
        depth = 0
        for at in range(start + len(opening) - 1, stop):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[start + len(opening) : at]
        stop = start  # never closed: the braces of an earlier box end before it
    return None


def normalise(text: str, *, ignore_case: bool = True) -> str:
    """Return the text in canonical Unicode (NFC), signs as `PLAIN` has them, one space for each run of white space.

    The punctuation that ends it and the quotes, asterisks or backticks that wrap the whole text are removed.
    Signs, brackets, units and decimal points stay. Text made of nothing else is returned as it is.

    >>> normalise(' **"The  Cat."** ')
    'the cat'
    >>> normalise("-.5"), normalise("?")
    ('-.5', '?')
    """
    text = " ".join(unicodedata.normalize("NFC", text).translate(PLAIN).split())
    if ignore_case:
        text = text.casefold()
    low, high = 0, len(text)  # indices and no slices, so that 100,000 quotes are peeled in linear time
    while low < high:
        if text[high - 1] in _TRAILING or text[high - 1] == " ":
            high -= 1
        elif text[low] == " ":
            low += 1
        elif high - low > 1 and _PAIRS.get(text[low]) == text[high - 1]:
            low, high = low + 1, high - 1
        else:
            return text[low:high]
    return text


def gold_texts(answer: Answer, *, whole: bool = False) -> list[str]:
    """Return the gold answers of a row as texts that are not blank; any of them is right.

    A text that is a list of texts (`text_list`) is read as that list; with `whole` it is itself one more answer. A
    whole float is written as an integer, because a column of integers with gaps arrives as floats; nan is a gap.
    Raise TypeError for a mapping or bytes, which no completion equals.

    >>> gold_texts(3.0), gold_texts(["a", None, " "]), gold_texts("['a', 'b']"), gold_texts(None)
    (['3'], ['a'], ['a', 'b'], [])
    """
    if isinstance(answer, str) and (listed := text_list(answer)):
        answer = (*listed, answer) if whole else listed
    golds = [answer] if answer is None or isinstance(answer, str | int | float) else list(answer)
    for gold in (answer, *golds):
        if isinstance(gold, Mapping | bytes):
            raise TypeError(f"the gold answer {gold!r:.80} is no text, number or list of these")
    texts = [
        str(int(gold)) if isinstance(gold, float) and gold.is_integer() else str(gold)
        for gold in golds
        if gold is not None and gold == gold  # nan, pandas' missing value, does not equal itself
    ]
    return [text for text in texts if text.strip()]


@lru_cache(maxsize=4096)
def text_list(text: str) -> tuple[str, ...]:
    """Return the texts of a list that is kept as text, as Python, JSON or numpy write it; () for anything else.

    It holds quoted texts, and perhaps numbers and nulls beside them. A list of nothing but numbers may be an interval
    or a box, and is not read.

    >>> text_list('["a", 3, null]'), text_list("['a' 'b']"), text_list("[0, 1]"), text_list("('a')")
    (('a', '3'), ('a', 'b'), (), ())
    """
    text = text.strip()
    if len(text) <= _MAX_LIST and (array := _ARRAY.fullmatch(text)):
        text = array[1].strip()
    if text[:1] + text[-1:] not in ("[]", "()", "{}") or len(text) > _MAX_LIST or not _LIST.fullmatch(text):
        return ()
    items = _ITEM.findall(text)
    if not any(quote for quote, _ in items) or (text[0] == "(" and len(items) == 1 and text[-2] != ","):
        return ()
    return tuple(_unquoted(quote) if quote else number for quote, number in items if quote or number)


def _unquoted(text: str) -> str:
    for parse in (json.loads, ast.literal_eval) if "\\" in text else ():
        with suppress(ValueError, SyntaxError):
            return str(parse(text))
    return text.removeprefix("u")[1:-1]


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern; None without one."""
    last = None
    for last in pattern.finditer(text):  # noqa: B007
        pass
    return last


def column_value(value: Any) -> Any:
    """Return a gold value as plain Python: JSON text parsed (None if it is not JSON), an array as lists."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # RecursionError: 100,000 opening brackets
            return None
    return value.tolist() if hasattr(value, "tolist") else value


def check_choice(option: str, value: str, *legal: str) -> None:
    """Raise ValueError unless an option has one of its legal values."""
    if value not in legal:
        raise ValueError(f"{option}={value!r}; legal are {', '.join(map(repr, legal))}")
