"""The reward `edit_similarity`: how close a transcription is to the gold text."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

from mm_grpo.rewards.builtins.answers import final_part
from mm_grpo.rewards.builtins.libraries import library
from mm_grpo.rewards.registry import reward


@reward("edit_similarity", needs=("answer",))
def edit_similarity(
    completion: str,
    answer: str | None,
    *,
    unit: Literal["characters", "words"] = "characters",
    ignore_case: bool = False,
) -> float | None:
    """1 - edits / length of the longer text, over characters or words.

    Insertions, deletions and substitutions count 1 each (Levenshtein). Compared are the completion's
    final part (the last `<answer>` block, else what follows `</think>`, else everything) and the gold
    text, in canonical Unicode with runs of white space as one space. With unit "words" it is 1 - the word
    error rate, taken over the longer text, so that it stays in [0, 1].

    Returns a score in [0, 1]; 1.0 when both are empty; None when the row has no gold text (None; an empty
    one means an empty page). ValueError when `unit` is another word. For OCR and page transcription:
    olmOCR, IAM, HierText. Needs the package rapidfuzz.

    >>> edit_similarity("kitten", answer="sitting")
    0.5714285714285714
    >>> edit_similarity("the black cat", answer="the cat", unit="words")
    0.6666666666666667
    """
    if unit not in ("characters", "words"):
        raise ValueError(f"unit={unit!r}; legal are 'characters' and 'words'")
    if answer is None:
        return None
    given, gold = (_units(text, unit, ignore_case) for text in (final_part(completion), str(answer)))
    longer = max(len(given), len(gold))
    if longer == 0:
        return 1.0
    distance: int = library("edit_similarity", ".distance").Levenshtein.distance(given, gold)
    return 1.0 - distance / longer


def _units(text: str, unit: str, ignore_case: bool) -> Sequence[str]:
    words = unicodedata.normalize("NFC", text).split()
    if ignore_case:
        words = [word.casefold() for word in words]
    return words if unit == "words" else " ".join(words)
