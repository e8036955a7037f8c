"""Numbers as people and models write them: 1,234.5, 3.2e5, 3 × 10^5, 12 %, 1 1/2, \\frac{1}{2}, ½, twenty-three.

`numbers` finds those in digits, `number_words` those in English words. Not here: expressions with
variables or roots (the reward `math`). Both take linear time: every repeat in a pattern is bounded
or cannot fail after it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass

_THIN = "\u2009"  # how all spaces between thousands are written here
_CLEAN = (
    (re.compile(r"[−–﹣－](?=\s?[\d.\\(])"), "-"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|[\u00a0\u202f])(?=\d{3})"), _THIN),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\(?:left|right|displaystyle|[,;:!$]|[()\[\]])|\$"), ""),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s?\{\s?(-?[\d.,]{1,40})\s?\}\s?\{\s?(-?[\d.,]{1,40})\s?\}"), r" \1/\2"),
    (re.compile(r"\\frac\s?(\d)\s?(\d)"), r" \1/\2"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])\s?"), "×"),
    (re.compile(r"\^\s?\{?\\circ\}?"), "°"),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]{0,80})\}"), r" \1"),
    (re.compile(r"[¼½¾⅐-⅞↉]"), lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("\u2044", "/")),
)
_PLAIN = rf"(?:(?:\d{{1,3}}(?:[,{_THIN}]\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?:(?<![\w.)\]}}])(?P<sign>[-+])[ ]?)?
    (?:(?P<whole>\d{{1,15}})[ ]{{1,2}}(?P<top>\d{{1,15}})/(?P<bottom>\d{{1,15}})(?![\d/])
     |(?P<over>{_PLAIN})[ ]?/[ ]?(?P<under>-?{_PLAIN})
     |(?P<plain>{_PLAIN})
      (?:[eE](?P<e>[-+]?\d{{1,9}})(?!\w)|[ ]?[×x*][ ]?10[ ]?\^[ ]?\{{?(?P<power>[-+]?\d{{1,9}})\}}?)?)
    (?:[ ]?(?P<scale>thousand|million|billion|trillion)\b)?
    (?:[ ]?(?P<percent>%|per[ ]?cent\b))?
    (?:[ ]?(?P<unit>[^\W\d_]{{1,20}}[²³]?(?:[/^][\w-]{{1,10}})?|°[CF]?|[€£¥]))?""",
    re.VERBOSE,
)
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}

_UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = [
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {
    **{word: ("unit", i) for i, word in enumerate(_UNITS)},
    **{word: ("teen", i + 10) for i, word in enumerate(_TEENS)},
    **{word: ("ten", 10 * i + 20) for i, word in enumerate(_TENS)},
}
_LARGE = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}


@dataclass(frozen=True)
class Number:
    """A number in a text. `value` is as written (12 for "12 %"); `unit` is the word right after it, or "".

    `span` is where it stands in the cleaned text: a number that covers all of it has nothing beside it.
    """

    value: float
    percent: bool = False
    unit: str = ""
    span: tuple[int, int] = (0, 0)


def clean(text: str) -> str:
    r"""The text with LaTeX spacing and wrappers removed and fractions written a/b.

    >>> clean(r"$-1\dfrac{1}{2}$ \text{cm}")
    '-1 1/2  cm'
    """
    for pattern, replacement in _CLEAN:
        text = pattern.sub(replacement, text)
    return text


def numbers(text: str) -> list[Number]:
    r"""All finite numbers in digits, in order. A comma groups thousands; a decimal comma is not read.

    >>> [n.value for n in numbers(r"1,234.5 and \frac{3}{4}, then -2 \times 10^{3} or 2 1/2")]
    [1234.5, 0.75, -2000.0, 2.5]
    >>> numbers("12.5 % of 3 cm")[0].percent, numbers("12.5 % of 3 cm")[1].unit
    (True, 'cm')
    """
    found = []
    for match in _NUMBER.finditer(clean(text)):
        value = _value(match)
        if value is not None and math.isfinite(value):
            unit = match["unit"] or ""
            found.append(Number(value, match["percent"] is not None, unit.casefold(), match.span()))
    return found


def number_words(text: str) -> list[int]:
    """All numbers in English words, in order; "none" and "nothing" are 0.

    >>> number_words("One hundred and five cats, twenty-three dogs, two dozen birds, none of them grey")
    [105, 23, 24, 0]
    """
    found: list[int] = []
    total, current, kind = 0, 0, ""  # kind is that of the last word: "" outside a number
    for word in re.findall(r"[a-z]+|[^\sa-z-]", text.lower()):
        if word in _SMALL:
            new, value = _SMALL[word]
            if kind in ("unit", "teen") or (kind == "ten" and new != "unit") or (kind and value == 0):
                found.append(total + current)
                total, current = 0, 0
            current, kind = current + value, new
        elif word in _LARGE and (kind or word in ("dozen", "hundred")):
            size = _LARGE[word]
            if current >= 100 if size < 1000 else 0 < total < 1000 * size:  # "a hundred hundred": two numbers
                found.append(total + current)
                total, current = 0, 0
            if size >= 1000:
                total, current = total + (current or 1) * size, 0
            else:
                current = (current or 1) * size
            kind = "large"
        elif word == "and" and kind == "large":
            continue
        else:
            if kind:
                found.append(total + current)
            total, current, kind = 0, 0, ""
            if word in ("none", "nothing"):
                found.append(0)
    return [*found, total + current] if kind else found


def _value(match: re.Match[str]) -> float | None:
    if match["whole"]:
        top, bottom = float(match["top"]), float(match["bottom"])
        value = float(match["whole"]) + top / bottom if bottom else None
    elif match["over"]:
        bottom = _plain(match["under"])
        value = _plain(match["over"]) / bottom if bottom else None
    else:
        value = float(f"{_plain_text(match['plain'])}e{match['e'] or match['power'] or 0}")
    if value is None:
        return None
    value *= _SCALES.get(match["scale"] or "", 1.0)
    return -value if match["sign"] == "-" else value


def _plain_text(text: str) -> str:
    return text.replace(",", "").replace(_THIN, "")


def _plain(text: str) -> float:
    return float(_plain_text(text))
