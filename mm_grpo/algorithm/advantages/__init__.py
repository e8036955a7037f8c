"""Rewards to advantages: what a completion's reward is compared with, and what the difference is divided by.

Each file holds one estimator, in plain double precision:

    groups.py                whose rewards count, and a group less its mean
    grpo.py                  less the group's mean, over a deviation (`scale_rewards`)
    rloo.py                  less the mean of the others in the group
    reinforce_plus_plus.py   less the group's mean, over the deviation of all such differences
    gdpo.py                  each reward by itself first, then their weighted sum (`normalize_then_sum`)

All share three rules: a reward of None leaves its group's baseline and gets advantage 0, as does a lone
reward, which has nothing to be compared with; a group whose rewards are all equal gets exact zeros, never
rounding residue; a reward that is not finite raises ValueError. A new estimator is one file, one line in
`ESTIMATORS` and one word in the config's `advantage_estimator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mm_grpo.algorithm.advantages.gdpo import Objective, gdpo
from mm_grpo.algorithm.advantages.groups import Rewards
from mm_grpo.algorithm.advantages.grpo import group_advantages
from mm_grpo.algorithm.advantages.reinforce_plus_plus import reinforce_plus_plus_baseline
from mm_grpo.algorithm.advantages.rloo import rloo
from mm_grpo.config import AlgorithmConfig

__all__ = ["ESTIMATORS", "Objective", "advantages", "gdpo", "group_advantages"]

ESTIMATORS: dict[str, Callable[[Rewards, AlgorithmConfig], list[tuple[float, ...]]]] = {
    "grpo": lambda rewards, config: group_advantages(rewards, config.scale_rewards),
    "rloo": lambda rewards, config: rloo(rewards),
    "reinforce_plus_plus_baseline": lambda rewards, config: reinforce_plus_plus_baseline(rewards),
}


def advantages(
    rewards: Rewards, config: AlgorithmConfig, objectives: Sequence[Objective] = ()
) -> list[tuple[float, ...]]:
    """Advantages [P][G] of total rewards [P][G], as the config says.

    `objectives` are the rewards that the totals are made of; only `normalize_then_sum` looks at them, and
    at the totals then for one thing: a completion whose total is None has no part either. Raises ValueError
    for a reward that is not finite.
    """
    if config.multi_objective_aggregation == "normalize_then_sum":
        return gdpo(rewards, objectives)
    return ESTIMATORS[config.advantage_estimator](rewards, config)
