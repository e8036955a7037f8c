"""The reward `anls`: average normalised Levenshtein similarity, the measure of document questions."""

from __future__ import annotations

from mm_grpo.rewards.builtins.answers import Answer, final_part, gold_texts
from mm_grpo.rewards.builtins.libraries import library
from mm_grpo.rewards.registry import reward


@reward("anls", needs=("answer",))
def anls(completion: str, answer: Answer, *, threshold: float = 0.5) -> float | None:
    """How close the completion's answer is to the nearest gold text, by edits.

    ANLS of Biten et al., "Scene Text Visual Question Answering" (2019): with the normalised edit distance
    d (edits divided by the length of the longer text) it is 1 - d where d < `threshold`, else 0, and
    of several gold texts the best counts. White space is collapsed and case ignored, as DocVQA's
    evaluation does. The answer is the inside of the last `<answer>` block, else what follows
    `</think>`, else everything: extra words cost edits.

    Returns a score in [0, 1]; None when the row has no gold text. ValueError when the threshold is not
    in (0, 1]. For DocVQA, InfographicVQA, ST-VQA (their column `answers`: {answer: answers} in
    data.columns). Needs the package rapidfuzz.

    >>> anls("<answer>Boeng</answer>", answer="boeing"), anls("Airbus", answer=["boeing", "airbus"])
    (0.8333333333333334, 1.0)
    >>> anls("It is a Boeing", answer="boeing")
    0.0
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}; it is a normalised edit distance in (0, 1]")
    golds = [_plain(final_part(gold)) for gold in gold_texts(answer)]
    if not golds:
        return None
    distance = library("anls", ".distance").Levenshtein.distance
    given = _plain(final_part(completion))
    best = 0.0
    for gold in golds:
        longer = max(len(given), len(gold))
        if abs(len(given) - len(gold)) >= threshold * longer > 0:
            continue  # so many edits at least; this also keeps long texts cheap
        share = distance(given, gold) / longer if longer else 0.0
        if share < threshold:
            best = max(best, 1.0 - share)
    return best


def _plain(text: str) -> str:
    return " ".join(text.split()).lower()
