"""What guards keep from step to step: how long something has held, and how good rewards have been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOLVED = 0.9
"""Where the mean reward lies, between the lowest and the highest total of the run, from which a task counts as
solved: equal rewards and a sure policy are then what training was for, and no failure."""


class Streak:
    """Consecutive steps for which a condition has held.

    >>> streak = Streak()
    >>> [streak.count(held) for held in (True, True, False, True)]
    [1, 2, 0, 1]
    """

    def __init__(self) -> None:
        self.length = 0

    def count(self, holds: bool) -> int:
        """Take in one more step; the length of the streak that it ends, 0 where the condition does not hold."""
        self.length = self.length + 1 if holds else 0
        return self.length


class RewardRange:
    """The lowest and the highest total reward that any completion of the run had."""

    def __init__(self) -> None:
        self.low: float | None = None
        self.high: float | None = None

    def solved(self, metrics: Mapping[str, Any]) -> bool:
        """Take in one more step; whether its mean reward is near the highest total of the run.

        Never before two different totals were seen: the mean of equal rewards says nothing about what is best.
        """
        if metrics.get("reward_min") is None or metrics.get("reward_max") is None:
            return False
        low, high = float(metrics["reward_min"]), float(metrics["reward_max"])
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        width = self.high - self.low
        return width > 0 and float(metrics["reward"]) >= self.low + SOLVED * width
