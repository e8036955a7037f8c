"""The reward `count`: the answer is the right number of things, in digits or in words."""

from __future__ import annotations

from mm_grpo.rewards.builtins.answers import Answer, gold_texts
from mm_grpo.rewards.builtins.numeric import last_number
from mm_grpo.rewards.registry import reward


@reward("count", needs=("answer",))
def count(completion: str, answer: Answer, *, tolerance: int = 0) -> float | None:
    r"""Whether the completion states the gold count.

    The count is the last number in the last `\boxed{...}` of the final part (the last `<answer>` block,
    else what follows `</think>`, else everything), else in the final part itself: digits, also with
    separators for thousands, or English words ("twenty-three", "a dozen", "none") when there are no
    digits. A fraction or a negative number is no count. `tolerance` is how far off a right answer may be.

    Returns 1.0 or 0.0; None when the row has no gold answer. ValueError when the gold answer is no
    count or the tolerance is negative. For CLEVR, SuperCLEVR, TallyQA and PixMo-Count.

    >>> count("There are twelve sheep.", answer=12), count("<answer>13</answer>", answer="12")
    (1.0, 0.0)
    """
    if tolerance < 0:
        raise ValueError(f"tolerance={tolerance}; it is a number of things and must be at least 0")
    golds = [_gold(text) for text in gold_texts(answer)]
    if not golds:
        return None
    given = _count(completion)
    return float(given is not None and any(abs(given - gold) <= tolerance for gold in golds))


def _count(text: str) -> int | None:
    found = last_number(text)
    if found is None or found.percent or found.value < 0 or not found.value.is_integer():
        return None
    return int(found.value)


def _gold(text: str) -> int:
    gold = _count(text)
    if gold is None:
        raise ValueError(f"the gold answer {text[:80]!r} is no count, such as 3 or three")
    return gold
