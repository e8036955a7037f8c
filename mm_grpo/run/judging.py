"""From the scores of a step to its advantages.

The totals of `rewards/` and the estimators of `algorithm/` do not know each other; here the first are laid
out by groups for the second, less the KL where rewards pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mm_grpo.algorithm.advantages import Objective, advantages
from mm_grpo.algorithm.kl import penalised
from mm_grpo.config import AlgorithmConfig
from mm_grpo.rewards.registry import RewardSpec
from mm_grpo.rewards.scoring import Scores
from mm_grpo.types import Completion, Group, Prompt


@dataclass(frozen=True)
class Answered:
    """A prompt in its slot and its G completions. `kl` [G], in nats, is theirs where rewards pay for it."""

    slot: int
    attempt: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    kl: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scored:
    """An answered prompt and what was said of its completions, [G] each: totals, raw parts, logged columns."""

    answered: Answered
    rewards: tuple[float | None, ...]
    parts: Mapping[str, Sequence[float | None]]
    extra: Mapping[str, Sequence[Any]]

    def group(self, given: Sequence[float]) -> Group:
        """The group, with its advantages [G]."""
        a = self.answered
        return Group(a.slot, a.prompt, a.completions, self.rewards, tuple(given), a.attempt)


def by_group(answered: Sequence[Answered], scores: Scores) -> list[Scored]:
    """The scores, which are flat, cut into those of each prompt; ValueError where the counts differ."""
    sizes = [len(a.completions) for a in answered]
    if sum(sizes) != len(scores.totals):
        raise ValueError(f"{len(scores.totals)} totals for groups of {sum(sizes)} completions")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    cuts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [
        Scored(
            a,
            tuple(scores.totals[cut]),
            {name: values[cut] for name, values in scores.parts.items()},
            {name: values[cut] for name, values in scores.extra.items()},
        )
        for a, cut in zip(answered, cuts, strict=True)
    ]


def judge(
    scored: Sequence[Scored], specs: Sequence[RewardSpec], config: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """Advantages [P][G] of P scored prompts.

    With `kl_in_reward`, beta times a completion's KL comes off its total first. With `normalize_then_sum` each
    reward counts as it would in a total: clipped where its policy says so, absent where its gate is shut or
    the completion is masked, not at all with weight 0.
    """
    rewards = [s.rewards for s in scored]
    if config.kl_in_reward:
        rewards = penalised(rewards, [[config.beta * kl for kl in s.answered.kl] for s in scored])
    return advantages(rewards, config, _objectives(scored, specs))


def has_spread(scored: Scored, specs: Sequence[RewardSpec], config: AlgorithmConfig) -> bool:
    """Whether the rewards of a group tell its completions apart, before any KL is taken off."""
    return any(advantages([scored.rewards], config, _objectives([scored], specs))[0])


def _objectives(scored: Sequence[Scored], specs: Sequence[RewardSpec]) -> list[Objective]:
    return [
        Objective(
            spec.weight,
            [[None if v is None else spec.policy.clipped(v) for v in s.parts[spec.name]] for s in scored],
            spec.name,
        )
        for spec in specs
        if spec.weight != 0
    ]
