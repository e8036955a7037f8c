"""Rewards for answers in numbers: `numeric`, `count` and `chart_relaxed`; and how numbers are read from a text.

`numbers` finds numbers in digits: 1,234.5, 3.2e5, 3 × 10^5, 12 %, 1 1/2, \\frac{1}{2}, ½; `number_words` finds
English words. Both take linear time: every repeat in a pattern is bounded or cannot fail after it. Expressions with
variables or roots are for the reward `math` (`maths.py`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass

from mm_grpo.rewards.builtins.answers import Answer, boxed, final_part, gold_texts, normalise
from mm_grpo.rewards.registry import reward

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
_DIGITS = rf"(?:(?:\d{{1,3}}(?:[,{_THIN}]\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?:(?<![\w.)\]}}])(?P<sign>[-+])[ ]?)?
    (?:(?P<whole>\d{{1,15}})[ ]{{1,2}}(?P<top>\d{{1,15}})/(?P<bottom>\d{{1,15}})(?![\d/])
     |(?P<over>{_DIGITS})[ ]?/[ ]?(?P<under>-?{_DIGITS})
     |(?P<plain>{_DIGITS})
      (?:[eE](?P<e>[-+]?\d{{1,9}})(?!\w)|[ ]?[×x*][ ]?10[ ]?\^[ ]?\{{?(?P<power>[-+]?\d{{1,9}})\}}?)?)
    (?:[ ]?(?P<scale>thousand|million|billion|trillion)\b)?
    (?:[ ]?(?P<percent>%|per[ ]?cent\b))?
    (?:[ ]?(?:[^\W\d_]{{1,20}}[²³]?(?:[/^][\w-]{{1,10}})?|°[CF]?|[€£¥]))?""",
    re.VERBOSE,
)
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}

_UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = [f"{start}teen" for start in ("thir", "four", "fif", "six", "seven", "eigh", "nine")]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {word: i for i, word in enumerate([*_UNITS, "ten", "eleven", "twelve", *_TEENS])}
_VALUES |= {word: 10 * i + 20 for i, word in enumerate(_TENS)} | {"none": 0, "nothing": 0}
_WORDS = re.compile(rf"\b(?:({'|'.join(_TENS)})[ -]({'|'.join(_UNITS[1:])})|({'|'.join(_VALUES)}))\b")
_LARGE = re.compile(r"\b(?:dozen|hundred|thousand|million|billion)s?\b")


@reward("numeric", needs=("answer",))
def numeric(completion: str, answer: Answer, *, tolerance: float = 1e-6) -> float | None:
    r"""1 when the completion's last number is the gold number.

    The number is read from the last `\boxed{...}` of the final part (the last `<answer>` block, else what
    follows `</think>`, else everything), else from the whole final part; without a number in digits, English
    number words are read. The forms are 1,234.5 and 1{,}234 (a comma groups thousands, it is never a decimal
    comma), 1.5e3, 1.5 \times 10^3, 2 million, 3/4, \frac{3}{4}, 2 1/2, ½ and signs.

    A number is right if |number - gold| <= tolerance · |gold|. A percent sign on both or on neither side changes
    nothing. On one side, that number is right as it stands or as hundredths, because the row does not say
    which: gold 50 and gold 0.5 both accept "50 %". A unit, the word after
    the number, is ignored; nothing is converted.

    Returns 1.0 or 0.0; None when the row has no gold answer. Several gold answers mean any of them.
    ValueError when the gold text is not one number with nothing but a unit beside it (for roots and
    variables see the reward `math`) or the tolerance is negative. For CLEVR-Math, TabMWP
    and readings of instruments.

    >>> numeric("It is about <answer>1,234.5 kg</answer>", answer=1234.5)
    1.0
    >>> numeric(r"\boxed{\frac{1}{3}}", answer="0.3333", tolerance=1e-3), numeric("50%", answer="0.5")
    (1.0, 1.0)
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance}; it must be finite and at least 0")
    golds = [_gold_number(text) for text in gold_texts(answer)]
    if not golds:
        return None
    prediction = last_number(completion)
    if prediction is None:
        return 0.0
    pairs = (pair for gold in golds for pair in _readings(prediction, gold))
    return float(any(abs(value - target) <= tolerance * abs(target) for value, target in pairs))


def last_number(text: str) -> Number | None:
    """Return the last number of a text; None if it has no number, or its box holds a root or a function."""
    part = final_part(text)
    inner = boxed(part)
    if inner is not None:
        part = inner
        if "\\" in clean(inner):
            return None
    matches = numbers(part)
    if matches:
        return matches[-1]
    words = number_words(part)
    return Number(float(words[-1])) if words else None


_AMOUNT = re.compile(r"(?i)\d[²³]|\b(?:half|dozens?|(?:one|two|three)[ -](?:quarter|third)s?)\b")
"""Golds of which a part alone would be read: "3 dozen" as 3."""
_BOUND = re.compile(
    r"(?i)[<>≤≥+~]|\d ?[-–]|\b(?:at (?:least|most)|(?:more|less|fewer) than|over|under|up to)\b"
)
"""Golds that bound a count."""


def _gold_number(text: str) -> Number:
    part = final_part(text)
    inner = boxed(part)
    part = (part if inner is None else inner).strip()
    matches, cleaned = numbers(part), clean(part)
    if _AMOUNT.search(part):
        raise ValueError(f"the gold answer {text[:80]!r} is an amount in words; write its number")
    if not matches and len(words := number_words(part)) == 1:
        return Number(float(words[0]))
    remainder = cleaned[: matches[0].span[0]] + cleaned[matches[0].span[1] :] if len(matches) == 1 else "?"
    if remainder.strip(" .") not in ("", "about", "€", "£", "¥", "="):
        raise ValueError(f"the gold answer {text[:80]!r} is not one number; see math and exact_match")
    return matches[0]


def _readings(prediction: Number, gold: Number) -> list[tuple[float, float]]:
    value, target = prediction.value, gold.value
    if prediction.percent == gold.percent:
        return [(value, target)]
    if prediction.percent:
        return [(value, target), (value / 100, target)]
    return [(value, target), (value, target / 100)]


@reward("count", needs=("answer",))
def count(completion: str, answer: Answer) -> float | None:
    r"""1 when the completion states the gold count.

    The count is the last number in the last `\boxed{...}` of the final part (the last `<answer>` block,
    else what follows `</think>`, else everything), else in the final part itself: digits, also with
    separators for thousands, or English words up to ninety-nine ("twenty-three", "none") when there are no
    digits. A fraction or a negative number is no count.

    Returns 1.0 or 0.0; None when the row has no gold answer. ValueError when the gold answer is no
    count. For CLEVR, SuperCLEVR, TallyQA and PixMo-Count.

    >>> count("There are twelve sheep.", answer=12), count("<answer>13</answer>", answer="12")
    (1.0, 0.0)
    """
    golds = [_gold_count(text) for text in gold_texts(answer)]
    if not golds:
        return None
    return float(_count(completion) in golds)


def _count(text: str) -> int | None:
    number = last_number(text)
    if number is None or number.percent or number.value < 0 or not number.value.is_integer():
        return None
    return int(number.value)


def _gold_count(text: str) -> int:
    gold = _count(text)
    last = final_part(text).rpartition("####")[2]  # GSM8K writes its answers behind the steps
    several = len(numbers(boxed(last) or last) or number_words(last)) > 1
    if gold is None or several or _BOUND.search(last) or _AMOUNT.search(last):
        raise ValueError(f"the gold answer {text[:80]!r} is no count, such as 3 or three")
    return gold


@reward("chart_relaxed", needs=("answer",))
def chart_relaxed(completion: str, answer: Answer, *, exact_years: bool = False) -> float | None:
    """1 when the answer is the gold number within 5 %, or the gold text.

    The rule of Masry et al., "ChartQA" (2022): two numbers match if
    |number - gold| <= 0.05 · |gold|; otherwise the texts must be equal, case aside. "12%" is the number
    0.12, so it is not 12. Departures: commas between thousands and a leading $, € or £ are ignored, and a
    gold 0 asks for a number that is 0. By the published rule the year 2010 is right for 2015;
    `exact_years` asks for whole numbers from 1500 to 2100 exactly.

    The answer is the inside of the last `<answer>` block, else what follows `</think>`, else
    everything, without the full stop or quotes around it. It must be nothing but the number or text.

    Returns 1.0 or 0.0; None when the row has no gold answer. Several gold answers mean any of them.
    For ChartQA and PlotQA.

    >>> chart_relaxed("<answer>104</answer>", answer="100"), chart_relaxed("106", answer="100")
    (1.0, 0.0)
    >>> chart_relaxed("<answer>Blue.</answer>", answer="blue")
    1.0
    """
    golds = gold_texts(answer, whole=True)
    if not golds:
        return None
    prediction = normalise(final_part(completion))
    return float(any(_matches(prediction, normalise(final_part(gold)), exact_years) for gold in golds))


def _matches(prediction: str, gold: str, exact_years: bool) -> bool:
    value, target = _plain_number(prediction), _plain_number(gold)
    if value is None or target is None:
        return bool(prediction) and prediction == gold
    if exact_years and target.is_integer() and 1500 <= target <= 2100:
        return value == target
    return abs(value - target) <= 0.05 * abs(target)


def _plain_number(text: str) -> float | None:
    """Return the text as a finite number; None when it is anything else."""
    text = text.strip().lstrip("$€£").strip()
    percent = text.endswith("%")
    try:
        value = float(text.rstrip("%").strip().replace(",", ""))
    except ValueError:
        return None
    if not math.isfinite(value) or "_" in text:
        return None
    return value / 100 if percent else value


@dataclass(frozen=True)
class Number:
    """Number in a text."""

    value: float
    """As written: 12 for "12 %"."""
    percent: bool = False
    span: tuple[int, int] = (0, 0)
    """Its start and end in the cleaned text, with the unit."""


def clean(text: str) -> str:
    r"""Return the text with LaTeX spacing and wrappers removed and fractions written a/b.

    >>> clean(r"$-1\dfrac{1}{2}$ \text{cm}")
    '-1 1/2  cm'
    """
    for pattern, replacement in _CLEAN:
        text = pattern.sub(replacement, text)
    return text


def numbers(text: str) -> list[Number]:
    r"""Return all finite numbers in digits, in order. A comma groups thousands; a decimal comma is not read.

    >>> [n.value for n in numbers(r"1,234.5 and \frac{3}{4}, then -2 \times 10^{3} or 2 1/2")]
    [1234.5, 0.75, -2000.0, 2.5]
    >>> [n.percent for n in numbers("12.5 % of 3 cm")]
    [True, False]
    """
    matches = []
    for match in _NUMBER.finditer(clean(text)):
        value = _value_of(match)
        if value is not None and math.isfinite(value):
            matches.append(Number(value, match["percent"] is not None, match.span()))
    return matches


def number_words(text: str) -> list[int]:
    """Return all numbers up to ninety-nine in English words, in order; "none" and "nothing" are 0.

    Return an empty list if the text names a larger number, which could be cut ("two hundred").

    >>> number_words("Five cats, twenty-three dogs, none of them grey"), number_words("two hundred and five")
    ([5, 23, 0], [])
    """
    text = text.lower()
    if _LARGE.search(text):
        return []
    return [sum(_VALUES[word] for word in match.groups() if word) for match in _WORDS.finditer(text)]


def _value_of(match: re.Match[str]) -> float | None:
    if match["whole"]:
        top, bottom = float(match["top"]), float(match["bottom"])
        value = float(match["whole"]) + top / bottom if bottom else None
    elif match["over"]:
        bottom = _float(match["under"])
        value = _float(match["over"]) / bottom if bottom else None
    else:
        value = _float(f"{match['plain']}e{match['e'] or match['power'] or 0}")
    if value is None:
        return None
    value *= _SCALES.get(match["scale"] or "", 1.0)
    return -value if match["sign"] == "-" else value


def _float(text: str) -> float:
    """Return the value of digits with or without separators of thousands."""
    return float(text.replace(",", "").replace(_THIN, ""))
