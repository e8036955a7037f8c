"""The reward `length`: a shaping term that keeps answers within a range of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mm_grpo.rewards.registry import reward


@reward("length")
def length(
    completion: str,
    completion_ids: Sequence[int] = (),
    *,
    min_length: int = 0,
    max_length: int | None = None,
    unit: Literal["characters", "tokens"] = "characters",
    decay: int | None = None,
) -> float:
    """1 when the length is in [min_length, max_length], falling linearly to 0 outside.

    `unit` is "characters" (Unicode code points of the text as it is) or "tokens" (all sampled tokens,
    the end token too). `decay` is the number of units past a bound at which the score reaches 0; by default
    it is the bound itself: with max_length=200, 300 units score 0.5 and 400 score 0; with
    min_length=10, 5 units score 0.5 and an empty text scores 0. `max_length=None` sets no upper bound.

    Returns a score in [0, 1], never None. ValueError when no bound is set, when they are not
    0 <= min_length <= max_length, when decay is not above 0 or `unit` is another word.
    For any recipe, beside a reward for the answer.

    >>> length("abc", max_length=4), length("abcdef", max_length=4), length("abcdefgh", max_length=4)
    (1.0, 0.5, 0.0)
    """
    if min_length < 0 or (max_length is not None and max_length < min_length):
        raise ValueError(
            f"min_length={min_length}, max_length={max_length}; legal is 0 <= min_length <= max_length"
        )
    if min_length == 0 and max_length is None:
        raise ValueError("length has no bound; set min_length, max_length or both")
    if decay is not None and decay <= 0:
        raise ValueError(f"decay={decay}; it counts {unit} past a bound and must be above 0")
    if unit not in ("characters", "tokens"):
        raise ValueError(f"unit={unit!r}; legal are 'characters' and 'tokens'")
    size = len(completion) if unit == "characters" else len(completion_ids)
    if size < min_length:
        return max(0.0, 1.0 - (min_length - size) / (decay or min_length))
    if max_length is not None and size > max_length:
        return max(0.0, 1.0 - (size - max_length) / (decay or max_length or 1))
    return 1.0
