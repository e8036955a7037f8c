"""Rewards to advantages (GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    A[p, g] = (r[p, g] - mean_p) / (scale + 1e-4)

The mean is that of the group; the scale is the group's standard deviation (`group`), that of the
whole step (`batch`, Liu et al. 2025, arXiv:2508.08221) or absent (`none`, Dr. GRPO, Liu et al. 2025,
arXiv:2503.20783). Departures from the paper: deviations are sample deviations and 1e-4 guards the
division, both as in TRL; a group whose rewards are all equal gets exact zeros, never rounding residue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

EPSILON = 1e-4
Scale = Literal["group", "batch", "none"]


def group_advantages(
    rewards: Sequence[Sequence[float | None]], scale: Scale = "group"
) -> list[tuple[float, ...]]:
    """Advantages [P][G] of rewards [P][G], in double precision.

    A reward of None leaves its group's baseline and gets advantage 0; so does a lone reward, which has
    nothing to be compared with. Raises ValueError for a reward that is not finite.
    """
    for p, row in enumerate(rewards):
        for g, r in enumerate(row):
            if r is not None and not math.isfinite(r):
                raise ValueError(
                    f"reward of generation {g} in group {p} is {r}; rewards must be finite or None"
                )
    known = [r for row in rewards for r in row if r is not None]
    batch_std = stdev(known) if len(known) > 1 else 0.0
    return [_one_group(row, scale, batch_std) for row in rewards]


def _one_group(row: Sequence[float | None], scale: Scale, batch_std: float) -> tuple[float, ...]:
    known = [r for r in row if r is not None]
    if len(known) < 2 or max(known) == min(known):
        return (0.0,) * len(row)
    mean = fmean(known)
    divisor = {"group": stdev(known) + EPSILON, "batch": batch_std + EPSILON, "none": 1.0}[scale]
    return tuple(0.0 if r is None else (r - mean) / divisor for r in row)
