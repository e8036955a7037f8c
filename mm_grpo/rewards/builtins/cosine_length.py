"""The reward `cosine_length`: short right answers are worth most, short wrong ones least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mm_grpo.rewards.builtins.answers import Answer
from mm_grpo.rewards.registry import get, reward

JUDGES = ("exact_match", "choice", "count", "numeric", "math", "contains", "chart_relaxed")


@reward("cosine_length", needs=("answer",))
def cosine_length(
    completion: str,
    answer: Answer,
    completion_ids: Sequence[int],
    *,
    max_length: int,
    correct: Literal[
        "exact_match", "choice", "count", "numeric", "math", "contains", "chart_relaxed"
    ] = "exact_match",
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
) -> float | None:
    """A score for right and wrong answers that moves with the length along half a cosine.

    From Yeo et al., "Demystifying Long Chain-of-Thought Reasoning" (2025): with t the share of
    `max_length` (in tokens, all sampled ones) that the completion uses, at most 1, the score is
    long + (short - long) · (1 + cos(πt)) / 2, where (short, long) are `right_short` and `right_long` for a
    right answer, else `wrong_short` and `wrong_long`. The defaults are those of open-r1; the paper uses
    2, 1, -10 and 0. Its extra punishment past the limit is the reward `soft_overlong`.

    `correct` names the built-in that says whether the answer is right (its score is 1), with its default
    options. It includes the answer's worth: use it in place of that reward, not beside it. With "math" set
    `isolated: true` in the entry, as that reward has of its own.

    Returns a score between the least and the greatest of the four; None when the row has no gold answer.
    ValueError when max_length is not above 0 or `correct` is none of these rewards. For recipes with
    long reasoning, so that answers do not grow without getting better.

    >>> [cosine_length("3", "3", range(n), max_length=100) for n in (0, 50, 100, 900)]
    [1.0, 0.75, 0.5, 0.5]
    >>> cosine_length("4", "3", [], max_length=100)
    -1.0
    """
    if max_length <= 0:
        raise ValueError(f"max_length={max_length}; it is a number of tokens and must be above 0")
    if correct not in JUDGES:
        raise ValueError(f"correct={correct!r}; legal are {', '.join(JUDGES)}")
    score = get(correct).fn(completion, answer)
    if score is None:
        return None
    short, long = (right_short, right_long) if score >= 1 else (wrong_short, wrong_long)
    share = min(1.0, len(completion_ids) / max_length)
    return long + (short - long) * (1 + math.cos(math.pi * share)) / 2
