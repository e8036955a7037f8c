"""Rewards to advantages: the baseline of a completion's reward, and the divisor of the difference.

    grpo                           less the group's mean, over a standard deviation (`scale_rewards`)
    rloo                           less the mean of the other rewards of the group
    reinforce_plus_plus_baseline   less the group's mean, over the standard deviation of all such differences
    maxrl                          less the group's mean, over that mean
    gdpo                           each reward by itself first, then their weighted sum (`normalize_then_sum`)

Axes: [P][G], the P groups (prompts) of the whole step, over all processes, of G completions each. Numbers are plain
doubles.

All share three rules. A reward of None does not enter its group's baseline and gets advantage 0, as does a lone reward.
A group of equal rewards gets exact zeros, never rounding residue. A reward that is not finite raises ValueError.

Standard deviations are sample deviations (n - 1), and 1e-4 guards each division, both as in TRL. A new estimator is one
function, one line in `ADVANTAGE_ESTIMATORS` and one word in the config's `advantage_estimator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, Protocol

from mm_grpo.errors import RewardError

EPSILON = 1e-4
"""Added to every standard deviation that something is divided by, as in TRL."""

MAXRL_EPSILON = 1e-6
"""Added to the mean that `maxrl` divides by."""

Rewards = Sequence[Sequence[float | None]]
"""Rewards [P][G]; None if no reward applies to the completion."""

Scale = Literal["group", "batch", "none"]


class AdvantageOptions(Protocol):
    """Options that estimators read; `AlgorithmConfig` has them."""

    @property
    def advantage_estimator(self) -> str: ...
    @property
    def multi_objective_aggregation(self) -> str: ...

    scale_rewards: Scale
    turn_gamma: float | None


@dataclass(frozen=True)
class Objective:
    """Reward of a step: its weight, and its unweighted scores [P][G]."""

    weight: float
    scores: Rewards
    name: str = "reward"


def advantages(
    rewards: Rewards, options: AdvantageOptions, objectives: Sequence[Objective] = ()
) -> list[tuple[float, ...]]:
    """Return advantages [P][G] of total rewards [P][G], by the estimator of `options`.

    `objectives` are the rewards that the totals are made of. Only `normalize_then_sum` uses them, and of the totals
    then only which are None. Raises ValueError for a reward that is not finite.
    """
    if options.multi_objective_aggregation == "normalize_then_sum":
        return gdpo(rewards, objectives)
    return ADVANTAGE_ESTIMATORS[options.advantage_estimator](rewards, options)


def grpo(rewards: Rewards, scale: Scale = "group") -> list[tuple[float, ...]]:
    """Less the group's mean, over a standard deviation (GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

        A[p, g] = (r[p, g] - mean_p) / (std + 1e-4)

    std is over the group (`group`) or the whole step (`batch`, Liu et al. 2025, arXiv:2508.08221);
    `none` does not divide (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). Departures from the paper: the
    sample deviation and the 1e-4.
    """
    require_finite(rewards)
    step_std = std([r for row in rewards for r in row]) if scale == "batch" else 0.0
    result = []
    for row in rewards:
        divisor = {"group": std(row) + EPSILON, "batch": step_std + EPSILON, "none": 1.0}[scale]
        result.append(zero_for_none([None if d is None else d / divisor for d in centered(row)]))
    return result


def rloo(rewards: Rewards) -> list[tuple[float, ...]]:
    """Less the mean of the other rewards of the group (REINFORCE leave-one-out: Kool et al. 2019).

        A[p, g] = r[p, g] - mean of r[p, h] over h != g = (r[p, g] - mean_p) * n / (n - 1)

    A completion's baseline does not depend on the
    completion, so the estimate is unbiased (Ahmadian et al. 2024, arXiv:2402.14740), and nothing divides it.
    No departures; the papers' penalty against the reference policy is `algorithm.kl_in_reward`.
    """
    require_finite(rewards)
    result = []
    for row in rewards:
        # of the rewards that are not None
        n = len(present(row))
        factor = n / (n - 1) if n > 1 else 0.0
        result.append(zero_for_none([None if d is None else d * factor for d in centered(row)]))
    return result


def reinforce_plus_plus_baseline(rewards: Rewards) -> list[tuple[float, ...]]:
    """Less the group's mean, over the standard deviation of all such differences (Hu 2025, arXiv:2501.03262).

        d[p, g] = r[p, g] - mean_p
        A[p, g] = d[p, g] / (std of all d of the step + 1e-4)

    With one scale for the step, an easy or hard prompt, whose rewards hardly differ, does not get the large
    advantages that its group's scale gives it; unlike with `scale_rewards: batch`, the differences between
    prompts are not part of the scale. Departures: the paper also subtracts the mean of d, which is 0
    already, group by group; the deviation counts completions, where verl counts each completion once per token.
    """
    require_finite(rewards)
    differences = [centered(row) for row in rewards]
    divisor = std([d for row in differences for d in row]) + EPSILON
    return [zero_for_none([None if d is None else d / divisor for d in row]) for row in differences]


def maxrl(rewards: Rewards) -> list[tuple[float, ...]]:
    """Less the group's mean, over that mean (MaxRL: Tajwar et al. 2026, arXiv:2602.02710).

        A[p, g] = (r[p, g] - mean_p) / (mean_p + 1e-6)

    With rewards of 0 and 1 the mean is the share of right answers, and dividing by it turns the gradient of that share
    into that of its logarithm, cut after G terms: a prompt that is seldom answered right counts for more. No
    departures; the 1e-6 is the authors' own. Raises RewardError for a total below 0.
    """
    require_finite(rewards)
    result = []
    for row in rewards:
        numbers = present(row)
        if numbers and min(numbers) < 0:
            raise RewardError(
                f"algorithm.advantage_estimator = 'maxrl': a total reward is {min(numbers):g}; it divides by the "
                "group's mean, so totals must be 0 or more; shift or clip the rewards, or use grpo"
            )
        divisor = (fmean(numbers) if numbers else 0.0) + MAXRL_EPSILON
        result.append(zero_for_none([None if d is None else d / divisor for d in centered(row)]))
    return result


def gdpo(totals: Rewards, objectives: Sequence[Objective]) -> list[tuple[float, ...]]:
    """Each reward compared with its group by itself, then their weighted sum (GDPO, arXiv:2601.05242).

        z_k[p, g] = (r_k[p, g] - mean_p(r_k)) / (std_p(r_k) + 1e-4)
        s[p, g]   = sum over k of w_k * z_k[p, g]
        A[p, g]   = s[p, g] / (std of all s of the step + 1e-4)

    Summing first loses how much was won: totals of 0 and 1 have the same advantages as totals of 0 and 2 once
    each is divided by its own group's deviation. Here every reward has its own deviation in its own group, its
    weight says what that is worth, and to win two of them counts for more than to win one.

    `totals` [P][G] are None for completions that have no reward at all, or were masked. A reward that does
    not apply to a completion (None: the row lacks a column, or a gate of `only_if` is shut) adds nothing to s
    there and leaves that reward's mean and deviation: a gated reward compares the completions that passed its
    gate with each other. A reward of weight 0 is only logged. Equal totals do not make advantages 0 here; equal
    scores of every reward do.

    This is TRL's `normalize_then_sum`. Departures: the mean of s over the step, which paper and TRL subtract,
    is 0 already, group by group. TRL counts a completion to which only rewards of weight 0 apply in the last
    deviation; here it has no reward.

    Raises ValueError if a score is not finite, a total has no scores, or scores have another shape.
    """
    if not objectives and any(t is not None for row in totals for t in row):
        raise ValueError("normalize_then_sum needs the scores of each reward, and got none")
    terms: list[list[list[float]]] = [[[] for _ in row] for row in totals]
    for objective in objectives:
        require_finite(objective.scores, objective.name)
        for row, total, scores in zip(terms, totals, objective.scores, strict=True):
            # a masked completion leaves the mean and deviation of every reward
            counted_scores = [None if t is None else s for t, s in zip(total, scores, strict=True)]
            divisor = std(counted_scores) + EPSILON
            for cell, d in zip(row, centered(counted_scores), strict=True):
                if d:
                    cell.append(objective.weight * d / divisor)
    sums = [
        [None if t is None else _sum(cell) for t, cell in zip(total, row, strict=True)]
        for total, row in zip(totals, terms, strict=True)
    ]
    # the mean of the sums is not subtracted: groups of equal scores keep exact zeros
    divisor = std([s for row in sums for s in row]) + EPSILON
    return [zero_for_none([None if s is None else s / divisor for s in row]) for row in sums]


ADVANTAGE_ESTIMATORS: dict[str, Callable[[Rewards, AdvantageOptions], list[tuple[float, ...]]]] = {
    "grpo": lambda rewards, options: grpo(rewards, options.scale_rewards),
    "maxrl": lambda rewards, options: maxrl(rewards),
    "rloo": lambda rewards, options: rloo(rewards),
    "reinforce_plus_plus_baseline": lambda rewards, options: reinforce_plus_plus_baseline(rewards),
}


def require_finite(rewards: Rewards, name: str = "reward") -> None:
    """Raise ValueError for a reward that is neither finite nor None."""
    for p, row in enumerate(rewards):
        for g, r in enumerate(row):
            if r is not None and not math.isfinite(r):
                raise ValueError(
                    f"{name} of generation {g} in group {p} is {r}; rewards must be finite or None"
                )


def present(row: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [r for r in row if r is not None]


def std(values: Sequence[float | None]) -> float:
    """Return the sample standard deviation of the values that are not None; 0 for fewer than two."""
    numbers = present(values)
    return stdev(numbers) if len(numbers) > 1 else 0.0  # exact: 0 for equal values


def centered(row: Sequence[float | None]) -> list[float | None]:
    """Return a group's rewards less their mean; exact zeros if all are equal."""
    numbers = present(row)
    # exact zeros: a mean is rounded, because 0.1 + 0.1 + 0.1 is not 0.3
    if not numbers or max(numbers) == min(numbers):
        return [None if r is None else 0.0 for r in row]
    mean = fmean(numbers)
    return [None if r is None else r - mean for r in row]


def zero_for_none(row: Sequence[float | None]) -> tuple[float, ...]:
    """Return a group's advantages, 0 for None."""
    return tuple(0.0 if a is None else a for a in row)


def _sum(terms: Sequence[float]) -> float:
    """Return the sum, exactly 0 if it is 0 but for rounding."""
    total = math.fsum(terms)
    # rewards that contradict each other cancel; their rounding would be divided by a tiny deviation
    return 0.0 if abs(total) <= 1e-12 * math.fsum(map(abs, terms)) else total
