"""Rewards for answers in words: `exact_match`, `contains`, `choice`, `anls` and `edit_similarity`.

`choice` reads an option letter in the many ways that models state one, the most explicit first. An ambiguous text
chooses nothing, because a false match would teach the model to write it. The other four compare
texts, `anls` and `edit_similarity` by the edits between them (rapidfuzz). Numbers are in `numeric.py`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mm_grpo.rewards.builtins import library
from mm_grpo.rewards.builtins.answers import (
    PLAIN,
    Answer,
    boxed,
    check_choice,
    final_part,
    gold_texts,
    last_match,
    normalise,
)
from mm_grpo.rewards.registry import reward

_AROUND = r"[ \t*_`\"'“”‘’$({\[]{0,8}"  # marks that may stand before a letter
# Words that follow the option A, but not the article.
_AFTER = "and|as|based|because|but|due|for|from|given|in|is|or|since|which|with"
_BEFORE = "answer|choice|choose|option|pick|select"


@reward("exact_match", needs=("answer",))
def exact_match(completion: str, answer: Answer, *, ignore_case: bool = True) -> float | None:
    r"""1 when the completion's final answer is the gold answer.

    The final answer is the inside of the last `<answer>` block, else what follows `</think>`, else the
    whole completion; and within that the inside of the last `\boxed{...}`, if there is one. The gold
    text is read in the same way, so a column may hold "<answer> 3 </answer>". White space,
    the punctuation that ends a sentence and wrapping quotes, asterisks or backticks do not count;
    nor does case, unless `ignore_case=False`. Texts are compared, not numbers: "3.0" is not "3".
    A list of gold answers means any of them, also one that is kept as text ("['a', 'b']"): for a gold that is such a
    text, give [text]. A whole gold float such as 3.0 is the text "3".

    Returns 1.0 or 0.0; None when the row has no gold answer (None, an empty or blank text, an empty list).
    For short answers of one spelling: the recipe shapes, VQA.
    The column is `answer`; another one is named in data.columns ({answer: solution}).

    >>> exact_match("<think>two and one</think> <answer>Three.</answer>", answer="three")
    1.0
    >>> exact_match("three or four", answer="three")
    0.0
    >>> exact_match(r"So it is \boxed{12}.", answer=["12", "twelve"])
    1.0
    """
    texts = gold_texts(answer, whole=True)
    if not texts:
        return None
    prediction = _final(completion, ignore_case)
    return float(bool(prediction) and any(prediction == _final(text, ignore_case) for text in texts))


def _final(text: str, ignore_case: bool) -> str:
    part = final_part(text)
    inner = boxed(part)
    inner = inner and re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]*)\}", r"\1", inner)
    return normalise(part if inner is None else inner, ignore_case=ignore_case)


@reward("contains", needs=("answer",))
def contains(
    completion: str, answer: Answer, *, mode: Literal["any", "all"] = "any", whole_words: bool = True
) -> float | None:
    """1 when the completion's final part contains the gold text.

    The final part is the inside of the last `<answer>` block, else what follows `</think>`, else
    everything. White space and case do not count. With `whole_words` a
    gold "cat" is not found in "category" (in scripts without spaces between words, such as Chinese, set
    it to false). Of several gold texts, mode "any" asks for one of them, "all" for each.

    Returns 1.0 or 0.0; None when the row has no gold text.
    ValueError when mode is another word. For open questions with short answers: TextVQA, OK-VQA.

    >>> contains("It looks like a Tabby cat.", answer="tabby")
    1.0
    >>> contains("red and blue", answer=["red", "green"], mode="all")
    0.0
    """
    check_choice("mode", mode, "any", "all")
    golds = [text for gold in gold_texts(answer) if (text := normalise(final_part(gold)))]
    if not golds:
        return None
    part = normalise(final_part(completion))
    # 5 is not in 1.5, 5.5 and 5,000
    before, behind = r"(?<!\w)(?:(?<!\d\.)|(?!\d))", r"(?!\w|(?<=\d)(?:\.\d|,\d{3}(?!\d)))"
    patterns = [before + re.escape(gold) + behind if whole_words else re.escape(gold) for gold in golds]
    hits = [re.search(pattern, part) is not None for pattern in patterns]
    return float(any(hits) if mode == "any" else all(hits))


@reward("choice", needs=("answer",))
def choice(completion: str, answer: str | None, *, letters: str = "ABCDE") -> float | None:
    r"""1 when the completion chooses the gold option letter.

    Only the final part is read: the inside of the last `<answer>` block, else what follows `</think>`,
    else everything. In it, the first of these rules that finds something decides:

    1. Explicit statements: "The answer is **B**", "Answer: (b)", "correct option: B", "B is correct", "答案：B",
       "故选B", `\boxed{B}`, or a line that is just the letter ("B", "(B)", "b.", "**B**"). The last one wins. One
       that names several letters ("Answer: A or B") chooses nothing.
    2. A marker at the start, "B) a dog", "(B) a dog", "B. a dog", "B: a dog", if no later line starts with
       the marker of another letter (a list of the options chooses nothing).
    3. Mentions in brackets, in bold or after a word, "(B)", "**B**", "option B", if all name one letter.

    A small letter counts only alone or with a marker, and a capital A before a small word
    is an article: "Answer: A dog" chooses nothing. `letters` are the legal options, in capitals. The
    gold answer is a letter in any of these forms.

    Returns 1.0 or 0.0 (0.0 when no letter is found); None when the row has no gold answer (None or
    blank). ValueError when the gold text names no letter, because then the dataset or `letters` is wrong.
    For questions with options: ScienceQA, MMMU, A-OKVQA, MMBench.

    >>> choice("It has four legs. The answer is **B**.", answer="B")
    1.0
    >>> choice("<answer>A</answer> Wait. <answer>(c)</answer>", answer="A")
    0.0
    """
    if answer is None or answer != answer or not str(answer).strip():
        return None
    gold = chosen(str(answer), letters)
    if gold is None:
        raise ValueError(f"the gold answer {answer!r} names none of the options {letters}; see `letters`")
    return float(chosen(completion, letters) == gold)


def chosen(text: str, letters: str = "ABCDE") -> str | None:
    """Return the option letter that a text chooses, as a capital; None if it chooses no letter.

    >>> chosen("b) the second"), chosen("A or B"), chosen("Answer: A. No: the answer is D")
    ('B', None, 'D')
    """
    forms, part = _forms(letters), final_part(text).translate(PLAIN).replace("\r\n", "\n")
    if explicit := last_match(forms.explicit, part):
        choices = set(_letters(next(group for group in explicit.groups() if group is not None)))
        return choices.pop() if len(choices) == 1 else None
    # of a marker or a mention the last letter counts
    starts = {_letters(match[0])[-1] for match in forms.start.finditer(part)}
    if starts and forms.start.match(part.lstrip()):
        return starts.pop() if len(starts) == 1 else None
    mentioned = {_letters(match[0])[-1] for match in forms.mention.finditer(part)}
    return mentioned.pop() if len(mentioned) == 1 else None


@dataclass(frozen=True)
class _Forms:
    """The three rules as patterns. Every repeat is bounded, so that they take linear time."""

    explicit: re.Pattern[str]
    start: re.Pattern[str]
    mention: re.Pattern[str]


@lru_cache
def _forms(letters: str) -> _Forms:
    if not re.fullmatch(r"[A-Z]{2,26}", letters) or len(set(letters)) < len(letters):
        raise ValueError(f"letters={letters!r}; legal are two or more different capitals, such as 'ABCD'")
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
        rf"{noun}{link}{option}{_AROUND}(?:{boxed})?{_AROUND}(?P<choice>(?:{big}|{lone}){more})",
        rf"(?:答案|故?选项?)(?:应?[是为选]|[:：])?{_AROUND}(?P<chinese>{either}(?![A-Za-z]){more})",
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


def _letters(text: str) -> list[str]:
    """Return the words of one letter in a text, as capitals."""
    return [word.upper() for word in re.findall(r"(?<![^\W_])[A-Za-z](?![^\W_])", text)]


@reward("anls", needs=("answer",))
def anls(completion: str, answer: Answer) -> float | None:
    """Similarity of the completion's answer to the nearest gold text, by edits.

    ANLS of Biten et al., "Scene Text Visual Question Answering" (2019): with the normalised edit distance
    d (edits divided by the length of the longer text) the score is 1 - d if d < 0.5, else 0.
    Of several gold texts the best counts. White space is collapsed and case ignored, as DocVQA's
    evaluation does. The answer is the inside of the last `<answer>` block, else what follows
    `</think>`, else everything: extra words cost edits.

    Returns a score in [0, 1]; None when the row has no gold text. For DocVQA, InfographicVQA, ST-VQA (their column
    `answers`: {answer: answers} in data.columns). Needs the package rapidfuzz.

    >>> anls("<answer>Boeng</answer>", answer="boeing"), anls("Airbus", answer=["boeing", "airbus"])
    (0.8333333333333334, 1.0)
    >>> anls("It is a Boeing", answer="boeing")
    0.0
    """
    golds = [_lower(final_part(gold)) for gold in gold_texts(answer, whole=True)]
    if not golds:
        return None
    distance = library("anls", ".distance").Levenshtein.distance
    prediction = _lower(final_part(completion))
    best = 0.0
    for gold in golds:
        longer = max(len(prediction), len(gold))
        if abs(len(prediction) - len(gold)) >= 0.5 * longer > 0:
            continue  # d is at least 0.5; this also keeps long texts cheap
        share = distance(prediction, gold) / longer if longer else 0.0
        if share < 0.5:
            best = max(best, 1.0 - share)
    return best


def _lower(text: str) -> str:
    return " ".join(text.split()).lower()


@reward("edit_similarity", needs=("answer",))
def edit_similarity(completion: str, answer: str | None) -> float | None:
    """1 - edits / length of the longer text, in characters.

    Insertions, deletions and substitutions count 1 each (Levenshtein). The completion's final
    part (the last `<answer>` block, else what follows `</think>`, else everything) is compared with the gold
    text, in canonical Unicode with runs of white space as one space.

    Returns a score in [0, 1]; 1.0 when both are empty; None when the row has no gold text (None; an empty
    one means an empty page). For OCR and page transcription: olmOCR, IAM, HierText. Needs the package rapidfuzz.

    >>> edit_similarity("kitten", answer="sitting")
    0.5714285714285714
    """
    if answer is None:
        return None
    texts = (unicodedata.normalize("NFC", text) for text in (final_part(completion), str(answer)))
    prediction, gold = (" ".join(text.split()) for text in texts)
    longer = max(len(prediction), len(gold))
    if longer == 0:
        return 1.0
    distance: int = library("edit_similarity", ".distance").Levenshtein.distance(prediction, gold)
    return 1.0 - distance / longer
