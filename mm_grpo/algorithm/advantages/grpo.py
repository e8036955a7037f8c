"""Less the group's mean, over a deviation (GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    A[p, g] = (r[p, g] - mean_p) / (scale + 1e-4)

The scale is the group's standard deviation (`group`), that of the whole step (`batch`, Liu et al. 2025,
arXiv:2508.08221) or absent, with the 1e-4 (`none`, Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
Departures from the paper: deviations are sample deviations and 1e-4 guards the division, both as in TRL.
"""

from __future__ import annotations

from typing import Literal

from mm_grpo.algorithm.advantages.groups import EPSILON, Rewards, centred, filled, require_finite, spread

Scale = Literal["group", "batch", "none"]


def group_advantages(rewards: Rewards, scale: Scale = "group") -> list[tuple[float, ...]]:
    """Advantages [P][G] of rewards [P][G].

    Raises ValueError for a reward that is not finite.
    """
    require_finite(rewards)
    batch = spread([r for row in rewards for r in row]) if scale == "batch" else 0.0
    advantages = []
    for row in rewards:
        divisor = {"group": spread(row) + EPSILON, "batch": batch + EPSILON, "none": 1.0}[scale]
        advantages.append(filled([None if d is None else d / divisor for d in centred(row)]))
    return advantages
