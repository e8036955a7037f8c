"""Each reward compared with its group by itself, then their weighted sum (GDPO, arXiv:2601.05242).

    z_k[p, g] = (r_k[p, g] - mean_p(r_k)) / (std_p(r_k) + 1e-4)
    s[p, g]   = sum over k of w_k * z_k[p, g]
    A[p, g]   = s[p, g] / (std of all s of the step + 1e-4)

Summing first loses how much was won: totals of 0 and 1 have the same advantages as totals of 0 and 2 once
each is divided by its own group's deviation. Here every reward has its own spread in its own group, its
weight says what that is worth, and to win two of them counts for more than to win one.

A reward that does not apply to a completion (None: the row lacks a column, or a gate of `only_if` is
shut) adds nothing to s there and leaves that reward's mean and deviation: a gated reward compares the
completions that passed its gate with each other. A reward of weight 0 is only watched. Totals that are equal do not
make advantages 0 here, equal scores of every reward do.

This is TRL's `normalize_then_sum`, with its sample deviations and 1e-4. Departures: the mean of s over
the step, which paper and TRL take away, is 0 already, group by group; not to subtract it keeps the
exact zeros of groups without spread. TRL gives a completion to which only rewards of weight 0 apply a
place in the last deviation; here it has no reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mm_grpo.algorithm.advantages.groups import EPSILON, Rewards, centred, filled, require_finite, spread


@dataclass(frozen=True)
class Objective:
    """One reward: its weight, and its scores [P][G] as they enter a total, clipped but not weighted."""

    weight: float
    scores: Rewards
    name: str = "reward"


def gdpo(totals: Rewards, objectives: Sequence[Objective]) -> list[tuple[float, ...]]:
    """Advantages [P][G] from the scores of several rewards.

    `totals` [P][G] say with None which completions have no reward at all, or were masked. Raises ValueError
    for a score that is not finite, for totals without scores, and for scores of another shape than theirs.
    """
    if not objectives and any(t is not None for row in totals for t in row):
        raise ValueError("normalize_then_sum needs the scores of each reward, and got none")
    terms: list[list[list[float]]] = [[[] for _ in row] for row in totals]
    for objective in objectives:
        require_finite(objective.scores, objective.name)
        for row, total, scores in zip(terms, totals, objective.scores, strict=True):
            kept = [None if t is None else score for t, score in zip(total, scores, strict=True)]
            divisor = spread(kept) + EPSILON
            for cell, d in zip(row, centred(kept), strict=True):
                if d:
                    cell.append(objective.weight * d / divisor)
    sums = [
        [None if t is None else _sum(cell) for t, cell in zip(total, row, strict=True)]
        for total, row in zip(totals, terms, strict=True)
    ]
    divisor = spread([s for row in sums for s in row]) + EPSILON
    return [filled([None if s is None else s / divisor for s in row]) for row in sums]


def _sum(terms: Sequence[float]) -> float:
    """The sum, and exactly 0 where rewards that contradict each other cancel but for rounding."""
    total = math.fsum(terms)
    return 0.0 if abs(total) <= 1e-12 * math.fsum(map(abs, terms)) else total
