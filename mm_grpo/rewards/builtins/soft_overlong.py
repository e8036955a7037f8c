"""The reward `soft_overlong`: DAPO's soft punishment of overlong answers."""

from __future__ import annotations

from collections.abc import Sequence

from mm_grpo.rewards.registry import reward


@reward("soft_overlong")
def soft_overlong(completion: str, completion_ids: Sequence[int], *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length, and -1 beyond.

    Equation 13 of Yu et al., "DAPO" (2025), whose numbers are max_length=20480 and buffer=4096: a
    completion learns that it runs long before it is cut. `max_length` is best
    rollout.max_completion_length; both are in tokens, counting all sampled ones, the end token too.

    Returns a score in [-1, 0], never None. ValueError unless 0 < buffer <= max_length. For recipes with
    long reasoning, beside a reward for the answer.

    >>> [soft_overlong("", range(n), max_length=100, buffer=20) for n in (80, 90, 100, 200)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"buffer={buffer}, max_length={max_length}; legal is 0 < buffer <= max_length (tokens)"
        )
    past = len(completion_ids) - (max_length - buffer)
    return -min(1.0, past / buffer) if past > 0 else 0.0
