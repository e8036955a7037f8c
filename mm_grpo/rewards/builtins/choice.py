"""The reward `choice`: the option letter that a completion settles on is the gold one.

Models state a letter in many ways; the forms below are tried from the most explicit to the least. A letter
is read only where nothing else could be meant: a false match would teach the model to write it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from mm_grpo.rewards.builtins.answers import final_part
from mm_grpo.rewards.registry import reward

_AROUND = r"[ \t*_`\"'“”‘’$({\[]{0,8}"  # what may stand before a letter
# Words that follow the option A, not the article.
_AFTER = "and|as|based|because|but|due|for|from|given|in|is|or|since|which|with"
_BEFORE = "answer|choice|choose|option|pick|select"


@reward("choice", needs=("answer",))
def choice(completion: str, answer: str | None, *, letters: str = "ABCDE") -> float | None:
    r"""Whether the completion chooses the gold option letter.

    Only the final part is read: the inside of the last `<answer>` block, else what follows `</think>`,
    else everything. In it, the first of these rules that finds something decides:

    1. Explicit statements: "The answer is **B**", "Answer: (b)", "correct option: B", "B is correct",
       `\boxed{B}`, or a line that is just the letter ("B", "(B)", "b.", "**B**"). The last one wins. One
       that names several letters ("Answer: A or B") chooses nothing.
    2. A marker at the start, "B) a dog", "(B) a dog", "B. a dog", "B: a dog", if no later line starts with
       the marker of another letter (a list of the options chooses nothing).
    3. Mentions in brackets, in bold or after a word, "(B)", "**B**", "option B", if all name one letter.

    A small letter counts only where it stands alone or with a marker, and a capital A before a small word
    is an article: "Answer: A dog" chooses nothing. `letters` are the legal options, in capitals. The
    gold answer is a letter in any of these forms.

    Returns 1.0 or 0.0 (0.0 when no letter is found); None when the row has no gold answer (None or
    blank). ValueError when the gold text names no letter, for then the dataset or `letters` is wrong.
    For questions with options: ScienceQA, MMMU, A-OKVQA, MMBench.

    >>> choice("It has four legs. The answer is **B**.", answer="B")
    1.0
    >>> choice("<answer>A</answer> Wait. <answer>(c)</answer>", answer="A")
    0.0
    """
    if answer is None or not str(answer).strip():
        return None
    gold = chosen(str(answer), letters)
    if gold is None:
        raise ValueError(
            f"the gold answer {answer!r} names none of the options {letters}; see the option `letters`"
        )
    return float(chosen(completion, letters) == gold)


def chosen(text: str, letters: str = "ABCDE") -> str | None:
    """The option letter that a text settles on, as a capital; None when it settles on none.

    >>> chosen("b) the second"), chosen("A or B"), chosen("Answer: A. No: the answer is D")
    ('B', None, 'D')
    """
    forms, part = _forms(letters), final_part(text).replace("\r\n", "\n")
    explicit = None
    for explicit in forms.explicit.finditer(part):  # noqa: B007
        pass
    if explicit is not None:
        found = _letters(explicit)
        return found.pop() if len(found) == 1 else None
    starts = [_letter(match) for match in forms.start.finditer(part)]
    if starts and forms.start.match(part.lstrip()):
        return starts[0] if len(set(starts)) == 1 else None
    mentioned = {_letter(match) for match in forms.mention.finditer(part)}
    return mentioned.pop() if len(mentioned) == 1 else None


@dataclass(frozen=True)
class _Forms:
    """The three rules as patterns. Every repeat in them is bounded: none takes more than linear time."""

    explicit: re.Pattern[str]
    start: re.Pattern[str]
    mention: re.Pattern[str]


@lru_cache
def _forms(letters: str) -> _Forms:
    if not re.fullmatch(r"[A-Z]{2,26}", letters) or len(set(letters)) < len(letters):
        raise ValueError(
            f"letters={letters!r}; it lists the options as two or more different capitals, such as 'ABCD'"
        )
    small = letters.lower()
    either = f"[{letters}{small}]"
    words = "".join(sorted({"A", "I"} & set(letters)))
    article = rf"(?![{words}] (?!(?:{_AFTER})\b)[a-z])" if words else ""
    big = rf"{article}[{letters}](?!\w|['’]\w)"
    lone = rf"[{small}](?!\.\w)(?=[)}}\].*_`\"'$]|[ \t]{{0,3}}$)"  # a small letter that ends its phrase
    more = rf"(?:[ \t*)\]}}]{{0,4}}(?:,|/|&|\bor\b|\band\b){_AROUND}{big}){{0,25}}"
    boxed = r"\\boxed[ \t]{0,3}\{[ \t(]{0,3}(?:\\(?:text|mathrm|mathbf|textbf)[ \t]{0,3}\{[ \t(]{0,3})?"
    noun = r"(?i:\b(?:answer|choice|option))[*_]{0,2}"
    verb = r"(?i:is|was|would be|should be|must be)"
    link = rf"(?:[ \t]{{1,3}}{verb}\b[ \t]{{0,3}}[:：]?|[ \t]{{0,3}}[:：=]|[ \t]{{1,3}}[-–—])"
    option = r"(?:[ \t]{0,3}(?i:option|choice)\b)?"
    several = rf"(?:[ \t]{{0,3}},[ \t]{{0,3}}{either}){{0,25}}"
    verdict = r"(?i:is (?:the )?correct\b|is the (?:right |best )?(?:answer|choice|option)\b)"
    explicit = (
        rf"{noun}{link}{option}{_AROUND}(?:{boxed})?{_AROUND}(?P<said>(?:{big}|{lone}){more})",
        rf"{boxed}(?P<box>{either}{several})(?:[).:][^{{}}\n]{{0,80}})?[ \t]{{0,3}}\}}",
        rf"(?<![\w'’])(?P<verdict>[{letters}])[*_)`\"'$\]]{{0,4}} {verdict}",
        rf"^{_AROUND}(?P<line>{either}{more})[ \t*_`\"'“”‘’$)}}\].!]{{0,8}}$",
    )
    marker = rf"(?:\({either}\)|{either}\)|{either}[.:](?=[ \t*])|[{letters}],(?=[ \t]))"
    mention = rf"\([{letters}]\)|\*\*\(?[{letters}][).:]{{0,2}}\*\*|(?i:\b(?:{_BEFORE})) {big}"
    return _Forms(
        explicit=re.compile("|".join(explicit), re.MULTILINE),
        start=re.compile(rf"^[ \t*_`>#-]{{0,8}}{marker}", re.MULTILINE),
        mention=re.compile(mention),
    )


def _letters(match: re.Match[str]) -> set[str]:
    """All letters that an explicit statement names."""
    said = next(group for group in match.groups() if group is not None)
    return {word.upper() for word in re.findall(r"(?<![^\W_])[A-Za-z](?![^\W_])", said)}


def _letter(match: re.Match[str]) -> str:
    """The one letter in a marker or mention: its last word of one letter."""
    return str(re.findall(r"(?<![^\W_])[A-Za-z](?![^\W_])", match.group())[-1]).upper()
