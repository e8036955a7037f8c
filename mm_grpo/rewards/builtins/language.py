"""The reward `language`: the share of letters in the asked script."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from mm_grpo.rewards.registry import reward

_ONE_SCRIPT = {
    "ARABIC": "ar fa ur",
    "BENGALI": "bn",
    "CYRILLIC": "bg ru uk",
    "DEVANAGARI": "hi mr ne",
    "GEORGIAN": "ka",
    "GREEK": "el",
    "HEBREW": "he",
    "LATIN": "cs da de en es fi fr hu id it nl no pl pt ro sv tr vi",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
}
# Language: the scripts it is written in, as the first word of a letter's Unicode name.
SCRIPTS: dict[str, tuple[str, ...]] = {
    **{code: (script,) for script, codes in _ONE_SCRIPT.items() for code in codes.split()},
    "ja": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC"),
    "ko": ("HANGUL", "CJK"),
    "zh": ("CJK", "BOPOMOFO", "IDEOGRAPHIC"),
}
# What is in Latin letters in a text of any language: code, formulas, commands, tags and addresses.
_OTHER = re.compile(
    r"```.*?```|`[^`\n]{1,200}`|\$[^$\n]{1,500}\$|\\[A-Za-z]+|</?\w[^<>\n]{0,80}>|https?://\S+", re.DOTALL
)


@reward("language")
def language(completion: str, *, code: str) -> float:
    r"""The share of the completion's letters that belong to the script of a language.

    A letter's script is read from its Unicode name; digits, signs, spaces and emoji do not count, nor do
    code, formulas in $...$, LaTeX commands, tags and addresses. It tells Chinese from English, and not
    English from French: languages of one script all score the same, and for Japanese a wholly
    Chinese text scores 1. The rule of DeepSeek-R1's language consistency reward, by letters.

    `code` is the language: ar bg bn cs da de el en es fa fi fr he hi hu id it ja ka ko mr ne nl no pl pt ro
    ru sv ta te th tr uk ur vi zh.

    Returns a score in [0, 1], never None; 1.0 when there is no letter (an answer of digits is in no wrong
    language). ValueError for another code. For recipes whose model mixes languages while it thinks.

    >>> language("The answer is 答案", code="en")
    0.8461538461538461
    >>> language(r"答案是 $x = \frac{1}{2}$", code="zh")
    1.0
    """
    if code not in SCRIPTS:
        raise ValueError(f"code={code!r}; legal are {' '.join(sorted(SCRIPTS))}")
    scripts = SCRIPTS[code]
    text = unicodedata.normalize("NFKC", _OTHER.sub(" ", completion))
    found = [script for character in text if (script := _script(character)) is not None]
    return sum(script in scripts for script in found) / len(found) if found else 1.0


@lru_cache(maxsize=65536)
def _script(character: str) -> str | None:
    """The first word of a letter's Unicode name; None for what is no letter."""
    if not character.isalpha():
        return None
    return re.split(r"[ -](?!HIRAGANA)", unicodedata.name(character, "UNKNOWN"), maxsplit=1)[0]
