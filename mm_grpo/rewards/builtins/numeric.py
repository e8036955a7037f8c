"""The reward `numeric`: the answer is the gold number, within a tolerance."""

from __future__ import annotations

import math

from mm_grpo.rewards.builtins.answers import Answer, boxed, final_part, gold_texts
from mm_grpo.rewards.builtins.numerals import Number, clean, number_words, numbers
from mm_grpo.rewards.registry import reward


@reward("numeric", needs=("answer",))
def numeric(
    completion: str,
    answer: Answer,
    *,
    tolerance: float = 1e-6,
    absolute_tolerance: float = 0.0,
    match_unit: bool = False,
) -> float | None:
    r"""Whether the completion's last number is the gold number.

    It is looked for in the last `\boxed{...}` of the final part (the last `<answer>` block, else what
    follows `</think>`, else everything), else in the whole final part; without a number in digits, English
    number words are read. Read are 1,234.5 and 1{,}234 (a comma groups thousands, it is never a decimal
    comma), 1.5e3, 1.5 \times 10^3, 2 million, 3/4, \frac{3}{4}, 2 1/2, ½ and signs.

    Right is |given - gold| <= max(tolerance · |gold|, absolute_tolerance). A percent sign on both or on
    neither side changes nothing; on one side, that number is right as it stands or as hundredths, for the
    row cannot say which: gold 50 and gold 0.5 both accept "50 %". A unit is the word after the number;
    it is ignored, or with `match_unit` it must be the gold one, case aside. Nothing is converted.

    Returns 1.0 or 0.0; None when the row has no gold answer. Several gold answers mean any of them.
    ValueError when the gold text is not one number with nothing but a unit beside it (for roots and
    variables see the reward `math`) or a tolerance is negative. For CLEVR-Math, TabMWP
    and readings of instruments.

    >>> numeric("It is about <answer>1,234.5 kg</answer>", answer=1234.5)
    1.0
    >>> numeric(r"\boxed{\frac{1}{3}}", answer="0.3333", tolerance=1e-3), numeric("50%", answer="0.5")
    (1.0, 1.0)
    """
    if not (0 <= tolerance < math.inf and 0 <= absolute_tolerance < math.inf):
        raise ValueError(
            f"tolerance={tolerance}, absolute_tolerance={absolute_tolerance}; both must be finite and at least 0"
        )
    golds = [_gold(text) for text in gold_texts(answer)]
    if not golds:
        return None
    given = last_number(completion)
    if given is None:
        return 0.0
    return float(
        any(
            (not match_unit or given.unit == gold.unit)
            and any(
                abs(value - target) <= max(tolerance * abs(target), absolute_tolerance)
                for value, target in _readings(given, gold)
            )
            for gold in golds
        )
    )


def last_number(text: str) -> Number | None:
    """The number that a text settles on; None when it holds none, or its box holds a root or a function."""
    part = final_part(text)
    inner = boxed(part)
    if inner is not None:
        part = inner
        if "\\" in clean(inner):
            return None
    found = numbers(part)
    if found:
        return found[-1]
    words = number_words(part)
    return Number(float(words[-1])) if words else None


def _gold(text: str) -> Number:
    part = final_part(text)
    inner = boxed(part)
    part = (part if inner is None else inner).strip()
    found, cleaned = numbers(part), clean(part)
    if not found and len(words := number_words(part)) == 1:
        return Number(float(words[0]))
    beside = cleaned[: found[0].span[0]] + cleaned[found[0].span[1] :] if len(found) == 1 else "?"
    if beside.strip(" .") not in ("", "about", "€", "£", "¥", "="):
        raise ValueError(
            f"the gold answer {text[:80]!r} is not one number; see the rewards math and exact_match"
        )
    return found[0]


def _readings(given: Number, gold: Number) -> list[tuple[float, float]]:
    if given.percent == gold.percent:
        return [(given.value, gold.value)]
    if given.percent:
        return [(given.value, gold.value), (given.value / 100, gold.value)]
    return [(given.value, gold.value), (given.value, gold.value / 100)]
