"""The reward `math`: the answer equals the gold one as mathematics (math-verify)."""

from __future__ import annotations

import logging
import re
import unicodedata
from functools import lru_cache, partial
from typing import Any

from mm_grpo.rewards.builtins import library
from mm_grpo.rewards.builtins.answers import Answer, boxed, final_part, gold_texts, normalise
from mm_grpo.rewards.builtins.text import chosen
from mm_grpo.rewards.registry import reward

MAX_LENGTH = 500  # characters of an answer; of other text the last 1,000 are read
_WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{2,} [a-z]{2,}")
_LETTER = re.compile(r"\(?[A-E]\)?|[A-E][.:)]\s.*", re.DOTALL)
_PROSE = re.compile(r"\\(?:text|mathrm)\s?\{[^{}]*\}|(?<![\\A-Za-z{])[A-Za-z]{2,}(?:\^\{?\d\}?)?|\n")
_SIGNS = str.maketrans({"−": "-", "∞": "\\infty ", "×": "\\times ", "÷": "\\div ", "·": "\\cdot "})
_LATEX = (
    (r"(?<![\d}])–(?=\s?[\d.\\(])", "-"),
    (r"([√∛])\s?(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))",
     lambda m: f"\\sqrt{'[3]' * (m[1] == '∛')}{{{m[2] or m[3] or m[4]}}}"),
    (r"[¼½¾⅐-⅞]", lambda m: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", m[0]).split("\u2044"))),
    (r"[⁰¹²³⁴-⁹⁺⁻]+", lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}"),
    (r"(?<![\w./^}])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w/.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)", r"\1 \\times 10^{\2}"),
    (r"\^(-\d+)", r"^{\1}"),
    (r"\s?\bper ?cent\b", r"\\%"),
)  # fmt: skip
"""Patterns of plain notation, which math-verify misreads (2√3 as 2), and LaTeX for it."""
_POWER = r"(?:\^\{?[23]\}?)?"
_UNIT = rf"""(?!(?:alpha|beta|gamma|theta|lambda|sqrt|sin|cos|tan|log|dozen|hundred|thousand|[mbt]r?illion)\b)
    (?:[kcdmμn]?m|k?g|m?[lL]|s|h|ft|in|yd|lb|oz|[kMGmμn]?[A-ZΩ][a-z]?|[A-Za-z]{{3,20}})
    {_POWER}(?:\s?/\s?[A-Za-z]{{1,7}}{_POWER})?"""
_AROUND = re.compile(
    rf"""^(?:about|approximately|approx\.?|roughly|≈|~|\\approx)\s*
    |(?<=[\d}})π])(?:\\[,;\ ]|[\s~])*(?:\\(?:text|mathrm)\s?\{{[^{{}}]{{1,40}}\}}{_POWER}|[cdkm]m{_POWER}
    |(?:\s(?:sq\.?\s)?{_UNIT}){{1,4}})\.?$""",
    re.VERBOSE,
)
"""What may stand around a whole answer, and says nothing: that it is rounded, and units."""

for _name in ("parser", "grader"):  # they warn that their time-out is off; the scorer has its own
    logging.getLogger(f"math_verify.{_name}").addFilter(
        lambda record: "Timeout is disabled" not in record.getMessage()
    )


@reward("math", needs=("answer",), isolated=True, on_timeout="mask")
def maths(completion: str, answer: Answer, *, digits: int = 6) -> float | None:
    r"""1 when the completion's answer equals the gold answer as mathematics, judged by math-verify.

    The answer is the inside of the last `\boxed{...}` of the final part (the last `<answer>` block,
    else what follows `</think>`, else everything); without one, a whole `<answer>` block is read as
    LaTeX, and of other text the last formula or number. 0.5, 1/2 and \frac{1}{2} are equal, and so are
    (x+1)^2 and x^2+2x+1; sets, intervals, matrices, percent, 2√3, x² and 1 1/2 are read too, and units say
    nothing. Plain words equal only themselves. A gold letter from A to E, also before its text ("B. 45°"), is right
    as in the reward `choice` too. `digits` are the decimals to which floats are compared. Several gold
    answers mean any of them. An answer of more than 500 characters is wrong.

    Returns 1.0 or 0.0 (0.0 when nothing can be parsed); None when the row has no gold answer.
    ValueError when the gold answer cannot be parsed. For GEOQA, geometry3k, MathVista and MATH.

    math-verify's time-outs are off, because they use signals, which only a main thread gets. The deadline of the
    isolated reward replaces them: a call that hangs is killed. By default its completion is masked and counted,
    because the completion caused it. Needs the package math-verify.

    >>> maths(r"Half of it, so \boxed{\frac{1}{2}}.", answer="0.5")
    1.0
    >>> maths("<answer>x^2 + 2x + 1</answer>", answer="$(x+1)^2$"), maths("I do not know", answer="3")
    (1.0, 0.0)
    """
    golds = gold_texts(answer)
    if not golds:
        return None
    gold_expressions = [_gold(gold) for gold in golds]
    parts = [final_part(gold).strip() for gold in golds]
    letters = {chosen(part) for part in parts if _LETTER.fullmatch(part)} - {None}
    if chosen(completion) in letters or normalise(final_part(completion)) in map(normalise, parts):
        return 1.0
    prediction = _parse(*readings(completion))
    verify = partial(library("math").verify, float_rounding=digits, timeout_seconds=None)
    equal = (_same_text(gold, prediction) or verify(gold, prediction) for gold in gold_expressions)
    return float(bool(prediction) and any(equal))


@lru_cache(maxsize=4096)
def _gold(text: str) -> list[Any]:
    parsed = _parse(*readings(text, whole=True))
    if not parsed:
        raise ValueError(f"the gold answer {text[:80]!r} is no mathematics; see exact_match and choice")
    return parsed


def readings(text: str, whole: bool = False) -> tuple[str, ...]:
    """Return what `math` may read of a text, the best first. If `whole`, all of it is the answer."""
    part = final_part(text)
    whole, part = whole or len(part) < len(text), part.translate(_SIGNS)
    for pattern, latex in _LATEX:
        part = re.sub(pattern, latex, part)
    inner = boxed(part)
    if inner is not None:
        inner = _AROUND.sub("", inner.strip())
        # the inside alone too: math-verify does not read 45° in a box
        return (f"\\boxed{{{inner}}}", inner) if len(inner) <= MAX_LENGTH else ()
    tail = part[-2 * MAX_LENGTH :].strip()
    if whole:
        tail = re.sub(r"^(?:\$|\\[(\[])([^$]*?)(?:\$|\\[)\]])$", r"\1", tail)
    marked = any(sign in tail for sign in ("$", "\\(", "\\["))
    bare = whole or ("\\" in tail and not _WORDS.search(tail))
    # math-verify would read a bare "2\sqrt{2}" as the number 2, so a whole answer goes into a box.
    if bare and not marked and "\n" not in tail and 0 < len(tail) <= MAX_LENGTH:
        tail = _AROUND.sub("", tail)
        return (f"\\boxed{{{tail}}}", tail)
    formulas = [] if marked else [f for f in _PROSE.split(tail) if re.search(r"[\d\\]", f)]
    if formulas and "\\" in formulas[-1] and len(formulas[-1]) <= MAX_LENGTH:
        return (f"\\boxed{{{formulas[-1].strip(' .,;:=')}}}", tail)
    return (tail,)


def _parse(*candidates: str) -> list[Any]:
    """Return the first reading that gives an expression; else the text that math-verify falls back to."""
    parse = library("math").parse
    fallback: list[Any] = []
    for candidate in candidates:
        parsed: list[Any] = parse(candidate, parsing_timeout=None)
        if any(not isinstance(item, str) for item in parsed):
            return parsed
        fallback = fallback or parsed
    return fallback


def _same_text(gold: list[Any], prediction: list[Any]) -> bool:
    texts = {item for item in gold if isinstance(item, str) and item.strip()}
    return any(item in texts for item in prediction if isinstance(item, str))
