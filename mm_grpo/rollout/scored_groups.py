"""KL, rewards and advantages of groups that were sampled, as fields of `Group`.

The formulas are in algorithm/; here they meet the gates, weights and masks of a run's rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mm_grpo.algorithm.advantages import Objective, advantages
from mm_grpo.algorithm.kl import completion_kl, penalised
from mm_grpo.algorithm.turn_advantages import turn_advantages
from mm_grpo.rewards.outcome import gated

if TYPE_CHECKING:
    from mm_grpo.config import AlgorithmConfig
    from mm_grpo.rewards.scorer import Scores
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Group


def with_scores(groups: Sequence[Group], scores: Scores) -> list[Group]:
    """Return the groups with their part of `scores`, which are flat: completion after completion."""
    scored: list[Group] = []
    end = 0
    for group in groups:
        start, end = end, end + len(group.completions)
        masked = [bool(completion.masked) for completion in group.completions]
        totals = zip(masked, scores.totals[start:end], strict=True)
        turns = zip(masked, scores.turns[start:end], strict=True) if scores.turns else ()
        group = replace(
            group,
            # None and not 0: a masked completion leaves the baseline of its group
            rewards=tuple(None if skip else total for skip, total in totals),
            turn_rewards=tuple(tuple(None if skip else r for r in rewards) for skip, rewards in turns),
            parts={name: values[start:end] for name, values in scores.parts.items()},
            extra={name: values[start:end] for name, values in scores.extra.items()},
        )
        scored.append(group)
    return scored


def with_kl(
    groups: Sequence[Group], references: Sequence[Sequence[Sequence[float]]], estimator: str
) -> list[Group]:
    """Return the groups with each completion's KL, in nats, from `references` [P][G][T] to its log-probs as sampled."""
    return [
        replace(
            group,
            kl=tuple(
                completion_kl(completion.logprobs, reference, estimator)
                for completion, reference in zip(group.completions, of_group, strict=True)
            ),
        )
        for group, of_group in zip(groups, references, strict=True)
    ]


def advantage_fields(
    groups: Sequence[Group], specs: Sequence[RewardSpec], config: AlgorithmConfig
) -> list[dict[str, Any]]:
    """Return the advantages of each of P scored groups, as fields of `Group`."""
    if config.turn_gamma is None:
        return [{"advantages": values} for values in compute_advantages(groups, specs, config)]
    by_turn = turn_advantages([group.turn_rewards for group in groups], config)
    return [
        {"advantages": tuple(turns[0] for turns in of_group), "turn_advantages": of_group}
        for of_group in by_turn
    ]


def compute_advantages(
    groups: Sequence[Group], specs: Sequence[RewardSpec], config: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """Return the advantages [P][G] of P scored groups; with `kl_in_reward` beta times the KL comes off first."""
    rewards = [group.rewards for group in groups]
    # not in `has_zero_std`: the KL tells completions apart, and says nothing of their quality
    if config.kl_in_reward:
        rewards = penalised(rewards, [[config.beta * kl for kl in group.kl] for group in groups])
    return advantages(rewards, config, objectives(groups, specs))


def has_zero_std(group: Group, specs: Sequence[RewardSpec], config: AlgorithmConfig) -> bool:
    """Return True when the rewards of a group do not tell its completions apart, before any KL comes off."""
    if config.turn_gamma is not None:
        return not any(any(turns) for turns in turn_advantages([group.turn_rewards], config)[0])
    return not any(advantages([group.rewards], config, objectives([group], specs))[0])


def objectives(groups: Sequence[Group], specs: Sequence[RewardSpec]) -> list[Objective]:
    """Return the rewards with a weight, each with its scores [P][G] as they enter a total.

    A score is None if its gate is shut or the completion is masked.
    """
    parts = [gated(specs, group.parts) for group in groups]
    return [
        Objective(spec.weight, [part[spec.name] for part in parts], spec.name)
        for spec in specs
        if spec.weight != 0
    ]
