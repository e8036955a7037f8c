"""What a step's completions and rewards look like in numbers, under TRL's metric names."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from mm_grpo.health.duplicate_completions import unique_ratio
from mm_grpo.types import Group


def step_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward and completion statistics of a step's groups; lengths are in tokens."""
    completions = [c for g in groups for c in g.completions]
    lengths = [len(c.token_ids) for c in completions]
    known = [[r for r in g.rewards if r is not None] for g in groups]
    flat = [r for rewards in known for r in rewards]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(c.finish_reason == "length" for c in completions),
        "completions/unique_ratio": unique_ratio(groups),
        "frac_reward_zero_std": fmean(len(set(rewards)) < 2 for rewards in known),
    }
    if flat:
        metrics["reward"] = fmean(flat)
        metrics["reward_std"] = fmean(stdev(r) if len(r) > 1 else 0.0 for r in known)
    return metrics
