"""Metrics by the column `task`: how each kind of rows of a mixture does, beside the means over all.

They are made where the column holds a few short texts (`Dataset.by_task`). An entry of a mixture puts the column on its
rows with `task: NAME`; rows may have it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from mm_grpo.data.dataset import TASK
from mm_grpo.types import Group


def by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each task, in the order of the tasks' names; those without one are left out."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        task = group.prompt.sample.columns.get(TASK)
        if isinstance(task, str) and task:
            found.setdefault(task, []).append(group)
    return dict(sorted(found.items()))


def task_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of each task in scored groups: `task/{task}/prompts`, `/reward`, `/frac_reward_zero_std` and `/mean_length`.

    The mean total reward is absent where no reward applied; lengths are in tokens. As `group_metrics` over all tasks.
    """
    metrics: dict[str, float] = {}
    for task, own in by_task(groups).items():
        known = [[r for r in g.rewards if r is not None] for g in own]
        metrics[f"task/{task}/prompts"] = float(len(own))
        if rewards := [r for of_group in known for r in of_group]:
            metrics[f"task/{task}/reward"] = fmean(rewards)
        metrics[f"task/{task}/frac_reward_zero_std"] = fmean(len(set(of_group)) < 2 for of_group in known)
        metrics[f"task/{task}/mean_length"] = fmean(len(c.token_ids) for g in own for c in g.completions)
    return metrics
