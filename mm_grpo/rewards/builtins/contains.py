"""The reward `contains`: the gold text stands in the answer."""

from __future__ import annotations

import re
from typing import Literal

from mm_grpo.rewards.builtins.answers import Answer, final_part, gold_texts, normalise
from mm_grpo.rewards.registry import reward


@reward("contains", needs=("answer",))
def contains(
    completion: str,
    answer: Answer,
    *,
    mode: Literal["any", "all", "share"] = "any",
    ignore_case: bool = True,
    whole_words: bool = True,
    max_words: int | None = None,
) -> float | None:
    """Whether the completion's final part contains the gold text.

    The final part is the inside of the last `<answer>` block, else what follows `</think>`, else
    everything. White space, and case unless `ignore_case=False`, do not count. With `whole_words` a
    gold "cat" is not found in "category" (in scripts without spaces between words, such as Chinese, set
    it to false). Of several gold texts, mode "any" asks for one of them, "all" for each, and "share" scores
    the share that is found. `max_words` scores 0 for a final part of more words, so that a model
    cannot win by listing everything it can think of.

    Returns a score in [0, 1] (0.0 or 1.0 unless mode is "share"); None when the row has no gold text.
    ValueError when mode is another word. For open questions with short answers: TextVQA, OK-VQA.

    >>> contains("It looks like a Tabby cat.", answer="tabby")
    1.0
    >>> contains("red and blue", answer=["red", "green"], mode="share")
    0.5
    """
    if mode not in ("any", "all", "share"):
        raise ValueError(f"mode={mode!r}; legal are 'any', 'all' and 'share'")
    golds = [
        text for gold in gold_texts(answer) if (text := normalise(final_part(gold), ignore_case=ignore_case))
    ]
    if not golds:
        return None
    part = normalise(final_part(completion), ignore_case=ignore_case)
    if max_words is not None and len(part.split()) > max_words:
        return 0.0
    found = [_holds(part, gold, whole_words) for gold in golds]
    if mode == "share":
        return sum(found) / len(found)
    return float(any(found) if mode == "any" else all(found))


def _holds(text: str, gold: str, whole_words: bool) -> bool:
    if not whole_words:
        return gold in text
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text) is not None
