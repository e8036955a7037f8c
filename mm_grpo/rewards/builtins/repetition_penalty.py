"""The reward `repetition_penalty`: a completion that repeats itself loses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from mm_grpo.rewards.registry import reward


@reward("repetition_penalty")
def repetition_penalty(
    completion: str,
    completion_ids: Sequence[int] = (),
    *,
    ngram: int = 3,
    max_penalty: float = -1.0,
    unit: Literal["words", "tokens", "characters"] = "words",
) -> float:
    """max_penalty times the share of n-grams that were there before.

    With all n-grams counted and the different ones among them, it is
    max_penalty · (1 - different / all), as in Yeo et al., "Demystifying Long Chain-of-Thought Reasoning"
    (2025). `unit` says what an n-gram is made of: "words" (split at white space, case aside), "tokens"
    (the sampled ids), or "characters" for scripts without spaces.

    Returns a score in [max_penalty, 0], never None; 0.0 when there are fewer than `ngram` units.
    ValueError when ngram is below 1, max_penalty above 0 or `unit` another word. For recipes with long
    reasoning, where loops appear first.

    >>> repetition_penalty("a b c a b c"), repetition_penalty("no loop here at all")
    (-0.25, 0.0)
    """
    if ngram < 1 or max_penalty > 0:
        raise ValueError(
            f"ngram={ngram}, max_penalty={max_penalty}; legal are ngram >= 1 and max_penalty <= 0"
        )
    units: Sequence[Hashable]
    if unit == "words":
        units = completion.casefold().split()
    elif unit == "tokens":
        units = completion_ids
    elif unit == "characters":
        units = "".join(completion.split())
    else:
        raise ValueError(f"unit={unit!r}; legal are 'words', 'tokens' and 'characters'")
    total = len(units) - ngram + 1
    if total <= 0:
        return 0.0
    different = len({tuple(units[i : i + ngram]) for i in range(total)})
    return max_penalty * (1 - different / total) if different < total else 0.0
