"""Metrics of scored groups: rewards, completions, conversations, and the same for each task of a mixture.

Metrics by task are made if the column `task` holds a few short texts (`Rows.by_task`). An entry of a mixture puts
the column on its rows with `task: NAME`; rows may have it themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, TypeVar

from mm_grpo.data.base import TASK
from mm_grpo.health.checks import unique_ratio
from mm_grpo.types import Completion, Group

T = TypeVar("T")


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return reward and completion statistics of scored groups, under TRL's metric names; lengths are in tokens.

    `frac_reward_none` is the share of completions without a total, `completions/mean_logprob` the mean over all
    sampled tokens, in nats: its negative is an estimate of the policy's entropy.
    """
    completions = [c for g in groups for c in g.completions]
    lengths = [len(c.token_ids) for c in completions]
    values = [[r for r in g.rewards if r is not None] for g in groups]
    rewards = [r for of_group in values for r in of_group]
    logprobs = [logp for c in completions for logp in c.logprobs]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(c.finish_reason == "length" for c in completions),
        "completions/unique_ratio": unique_ratio(groups),
        "completions/mean_logprob": sum(logprobs) / max(len(logprobs), 1),
        "frac_reward_zero_std": fmean(len(set(of_group)) < 2 for of_group in values),
        "frac_reward_none": 1 - len(rewards) / len(completions),
    }
    if rewards:
        metrics["reward"] = fmean(rewards)
        metrics["reward_min"], metrics["reward_max"] = min(rewards), max(rewards)
        metrics["reward_std"] = fmean(stdev(r) if len(r) > 1 else 0.0 for r in values)
    metrics |= turn_metrics(completions)
    if kl := [value for g in groups for value in g.kl]:
        metrics["kl"] = sum(kl) / max(completion_tokens(groups), 1)
    return metrics


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return turns, calls, their failures by kind, and tokens of observations; {} without conversations.

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
    """Return the members of each value, in the order of the values as text; values None and "" are left out."""
    members: dict[str, list[T]] = {}
    for value, member in values:
        if value is not None and value != "":
            members.setdefault(str(value), []).append(member)
    return dict(sorted(members.items()))


def by_task(members: Iterable[tuple[Mapping[str, Any], T]]) -> dict[str, list[T]]:
    """Return the members of each task; `members` come with the columns of their rows."""
    tasks = ((columns.get(TASK), member) for columns, member in members)
    return by_value((task, member) for task, member in tasks if isinstance(task, str))


def task_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return `task/{task}/prompts`, `/reward`, `/frac_reward_zero_std`, `/mean_length` of each task of scored groups.

    They are the numbers of `group_metrics` over the groups of the task.
    """
    metrics: dict[str, float] = {}
    for task, task_groups in by_task((group.prompt.sample.columns, group) for group in groups).items():
        values = group_metrics(task_groups)
        values |= {"prompts": float(len(task_groups)), "mean_length": values["completions/mean_length"]}
        for name in ("prompts", "reward", "frac_reward_zero_std", "mean_length"):
            if name in values:  # no mean reward if no reward applied
                metrics[f"task/{task}/{name}"] = values[name]
    return metrics
