"""The reward of the recipe: how near the stated sum comes to the right one."""

from __future__ import annotations

import re

NEAR = {0: 1.0, 1: 0.4, 2: 0.15, 3: 0.15}
"""Score by the distance from the right sum; farther ones get 0."""


def near(completion: str, answer: str | int) -> float:
    """1 for the right sum, less for one that is up to 3 off. The sum is the last number of the completion."""
    numbers = re.findall(r"\d+", completion)
    return NEAR.get(abs(int(numbers[-1][:9]) - int(answer)), 0.0) if numbers else 0.0
