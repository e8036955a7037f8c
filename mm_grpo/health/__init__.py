"""Guards: one failure each, with a threshold, an action and a message that names cause and remedy.

    duplicate_completions  a group repeats itself more than its own probabilities allow
    logp_gap               engine and learner disagree about the log-probs of the same tokens
    update_happens         the optimizer ran and nothing moved, or nothing could; also a run without one update
                           (the guard `no_update`)
    reward_signal          groups without spread (`zero_std`), rewards that apply to nothing (`no_reward`)
    loss_terms             a KL of exactly 0 (`zero_kl`), tokens dropped by a correction (`masked_share`)
    collapse               `entropy_collapse`, and completions cut at their longest (`clipped_lengths`)
    tools                  calls that all fail (`tools_failing`), tools that are never called (`tools_unused`)
    unread_images          log-probs that are the same without the image
    sight                  rewards that rise while completions depend less and less on images (`sight_lost`)
    guards                 all of them together: what a step shows them, what is done, what a resume gives back

Those of one moment are functions that return a message or None. Those that need several steps are classes whose
`observe` takes a step's metrics and returns an `Alarm` or None, so that a resumed run rebuilds them from
metrics.jsonl; `Streak` and `RewardRange` are what they keep from step to step. A new guard is one of
the two, a line in `guards.py` and its name in the config's `run.guards`.

What a guard does when it fires is `stop` where the run is certainly broken, else `warn`; `run.guards` says
otherwise: `stop`, `warn` or `off`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.errors import GuardStop

logger = logging.getLogger("mm_grpo")


SOLVED = 0.9
"""Where the mean reward lies, between the lowest and the highest total of the run, from which a task counts as
solved: equal rewards and a sure policy are then what training was for, and no failure."""


@dataclass(frozen=True)
class Alarm:
    """What a guard found, and what it does about it unless `run.guards` says otherwise."""

    message: str
    action: Literal["stop", "warn"] = "warn"


def apply_guard(guard: str, message: str | None, actions: Mapping[Any, str], default: str = "stop") -> bool:
    """Stop the run, warn, or stay silent, as `actions[guard]` says (`default` when it says nothing).

    Returns whether the guard fired. Raises GuardStop on `stop`.
    """
    action = actions.get(guard, default)
    if message is None or action == "off":
        return False
    text = f"guard {guard}: {message} (run.guards.{guard}={action})"
    if action == "stop":
        raise GuardStop(text)
    logger.warning(text)
    return True


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
