"""The reward `chart_relaxed`: ChartQA's relaxed accuracy."""

from __future__ import annotations

import math

from mm_grpo.rewards.builtins.answers import Answer, final_part, gold_texts, normalise
from mm_grpo.rewards.registry import reward


@reward("chart_relaxed", needs=("answer",))
def chart_relaxed(
    completion: str, answer: Answer, *, tolerance: float = 0.05, exact_years: bool = False
) -> float | None:
    """Whether the answer is the gold number within 5 %, or the gold text.

    The rule of Masry et al., "ChartQA" (2022): when both are numbers and gold is not 0, right is
    |given - gold| <= tolerance · |gold|; otherwise the texts must be equal, case aside. "12%" is the number
    0.12, so it is not 12. Departures: commas between thousands and a leading $, € or £ are read past, and a
    gold 0 asks for a number that is 0. By the published rule the year 2010 is right for 2015;
    `exact_years` asks for whole numbers from 1500 to 2100 exactly.

    The answer is the inside of the last `<answer>` block, else what follows `</think>`, else
    everything, without the full stop or quotes around it. It must be nothing but the number or text.

    Returns 1.0 or 0.0; None when the row has no gold answer. Several gold answers mean any of them.
    ValueError when the tolerance is not in [0, 1). For ChartQA and PlotQA.

    >>> chart_relaxed("<answer>104</answer>", answer="100"), chart_relaxed("106", answer="100")
    (1.0, 0.0)
    >>> chart_relaxed("<answer>Blue.</answer>", answer="blue")
    1.0
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance={tolerance}; it is a share of the gold number, in [0, 1)")
    golds = gold_texts(answer)
    if not golds:
        return None
    given = normalise(final_part(completion))
    return float(any(_matches(given, normalise(final_part(gold)), tolerance, exact_years) for gold in golds))


def _matches(given: str, gold: str, tolerance: float, exact_years: bool) -> bool:
    value, target = _number(given), _number(gold)
    if value is None or target is None:
        return bool(given) and given == gold
    if exact_years and target.is_integer() and 1500 <= target <= 2100:
        return value == target
    return abs(value - target) <= tolerance * abs(target)


def _number(text: str) -> float | None:
    """The text as a finite number; None when it is anything else."""
    text = text.strip().lstrip("$€£").strip()
    percent = text.endswith("%")
    try:
        value = float(text.rstrip("%").strip().replace(",", ""))
    except ValueError:
        return None
    if not math.isfinite(value) or "_" in text:
        return None
    return value / 100 if percent else value
