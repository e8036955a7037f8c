"""Metrics of scored groups: rewards, completions, conversations, and the same for each task of a mixture.

Those by task are made where the column `task` holds a few short texts (`Rows.by_task`). An entry of a mixture puts
the column on its rows with `task: NAME`; rows may have it themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any, TypeVar

from mm_grpo.data.base import TASK
from mm_grpo.health.checks import unique_ratio
from mm_grpo.types import Completion, Group

T = TypeVar("T")


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward and completion statistics of scored groups, under TRL's metric names; lengths are in tokens.

    `frac_reward_none` is the share of completions without a total, `completions/mean_logprob` the mean over all
    sampled tokens, in nats: less it is an estimate of the policy's entropy.
    """
    completions = [c for g in groups for c in g.completions]
    lengths = [len(c.token_ids) for c in completions]
    known = [[r for r in g.rewards if r is not None] for g in groups]
    rewards = [r for of_group in known for r in of_group]
    logprobs = [logp for c in completions for logp in c.logprobs]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(c.finish_reason == "length" for c in completions),
        "completions/unique_ratio": unique_ratio(groups),
        "completions/mean_logprob": sum(logprobs) / max(len(logprobs), 1),
        "frac_reward_zero_std": fmean(len(set(of_group)) < 2 for of_group in known),
        "frac_reward_none": 1 - len(rewards) / len(completions),
    }
    if rewards:
        metrics["reward"] = fmean(rewards)
        metrics["reward_min"], metrics["reward_max"] = min(rewards), max(rewards)
        metrics["reward_std"] = fmean(stdev(r) if len(r) > 1 else 0.0 for r in known)
    metrics |= turn_metrics(completions)
    if kl := [value for g in groups for value in g.kl]:
        metrics["kl"] = sum(kl) / max(completion_tokens(groups), 1)
    return metrics


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Of conversations of several turns: turns, calls and their failures by kind, tokens of observations; else empty.

    `tools/call_frequency` is calls per conversation and `tools/failure_frequency` failures per call, as TRL has them.
    """
    if not any(c.turns for c in completions):
        return {}
    answers = [turn for c in completions for turn in c.turns if turn.role == "tool"]
    faults = Counter(turn.fault for turn in answers if turn.fault)
    return {
        "turns/mean": fmean(sum(turn.role == "assistant" for turn in c.turns) for c in completions),
        "turns/max": max(sum(turn.role == "assistant" for turn in c.turns) for c in completions),
        "tools/call_frequency": len(answers) / len(completions),
        "tools/failure_frequency": sum(faults.values()) / max(len(answers), 1),
        "tools/observation_tokens": sum(turn.tokens for turn in answers) / len(completions),
        "tools/masked": sum(c.masked is not None for c in completions),
        **{f"tools/failures/{kind}": count for kind, count in sorted(faults.items())},
    }


def completion_tokens(groups: Sequence[Group]) -> int:
    """Tokens of all completions."""
    return sum(len(c.token_ids) for g in groups for c in g.completions)


def by_value(values: Iterable[tuple[Any, T]]) -> dict[str, list[T]]:
    """What has each value, in the order of the values as text; without those that have None or ""."""
    found: dict[str, list[T]] = {}
    for value, one in values:
        if value is not None and value != "":
            found.setdefault(str(value), []).append(one)
    return dict(sorted(found.items()))


def task_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of each task in scored groups: `task/{task}/prompts`, `/reward`, `/frac_reward_zero_std` and `/mean_length`.

    They are those of `group_metrics` over its groups; groups without a task are in none.
    """
    tasks = ((group.prompt.sample.columns.get(TASK), group) for group in groups)
    metrics: dict[str, float] = {}
    for task, own in by_value((task, group) for task, group in tasks if isinstance(task, str)).items():
        found = group_metrics(own)
        found |= {"prompts": float(len(own)), "mean_length": found["completions/mean_length"]}
        for name in ("prompts", "reward", "frac_reward_zero_std", "mean_length"):
            if name in found:  # there is no mean reward where no reward applied
                metrics[f"task/{task}/{name}"] = found[name]
    return metrics
