"""What every estimator starts from: rewards that are finite, and a group's rewards less their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

EPSILON = 1e-4
"""Added to every deviation that something is divided by, as in TRL."""

Rewards = Sequence[Sequence[float | None]]
"""Rewards [P][G]; None where no reward applies to the completion."""


def require_finite(rewards: Rewards, name: str = "reward") -> None:
    """ValueError for a reward that is neither finite nor None."""
    for p, row in enumerate(rewards):
        for g, r in enumerate(row):
            if r is not None and not math.isfinite(r):
                raise ValueError(
                    f"{name} of generation {g} in group {p} is {r}; rewards must be finite or None"
                )


def present(row: Sequence[float | None]) -> list[float]:
    """The rewards of a group that are there."""
    return [r for r in row if r is not None]


def spread(values: Sequence[float | None]) -> float:
    """Sample standard deviation of the values that are there, 0 for fewer than two; exactly 0 where all are equal."""
    known = present(values)
    return stdev(known) if len(known) > 1 else 0.0


def centred(row: Sequence[float | None]) -> list[float | None]:
    """A group's rewards less their mean; exact zeros where all are equal, for 0.1 + 0.1 + 0.1 is not 0.3."""
    known = present(row)
    if not known or max(known) == min(known):
        return [None if r is None else 0.0 for r in row]
    mean = fmean(known)
    return [None if r is None else r - mean for r in row]


def filled(row: Sequence[float | None]) -> tuple[float, ...]:
    """A group's advantages, 0 where there is no reward."""
    return tuple(0.0 if a is None else a for a in row)
