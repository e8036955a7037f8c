"""From completions to scores to advantages, over all processes.

The first process scores what all of them answered, in training and in evaluation. The totals of `rewards/`
and the estimators of `algorithm/` do not know each other; here the first are laid out by groups for the
second, less the KL where rewards pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mm_grpo.algorithm.advantages import Objective, advantages
from mm_grpo.algorithm.kl import penalised
from mm_grpo.config import AlgorithmConfig
from mm_grpo.rewards.registry import RewardSpec
from mm_grpo.rewards.scoring import Scores
from mm_grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from mm_grpo.learner.distributed import Ranks
    from mm_grpo.rewards.scoring import Scorer


@dataclass(frozen=True)
class Answered:
    """A prompt in its slot and its G completions. `kl` [G], in nats, is theirs where rewards pay for it.

    In evaluation the slot is the number of the row.
    """

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


def answers(
    slots: Sequence[int], prompts: Sequence[Prompt], completions: Sequence[Completion], attempt: int = 0
) -> list[Answered]:
    """Prompts with their completions, which are flat, as many for each."""
    size = len(completions) // max(len(prompts), 1)
    cuts = [tuple(completions[i * size : (i + 1) * size]) for i in range(len(prompts))]
    return [Answered(s, attempt, p, ours) for s, p, ours in zip(slots, prompts, cuts, strict=True)]


def collected(answered: Sequence[Answered], ranks: Ranks, what: str) -> list[Answered] | None:
    """What all processes answered, in the order of slots, on the first one; None on the others. Collective.

    Of several processes the vision tensors stay where they are: no reward looks at them.
    """
    several = ranks.world > 1
    sent = [replace(a, prompt=replace(a.prompt, vision={})) for a in answered] if several else answered
    shares = ranks.collect(sent, what)
    return None if shares is None else sorted((a for s in shares for a in s), key=lambda a: a.slot)


def score(scorer: Scorer, answered: Sequence[Answered], step: int) -> Scores:
    """The scores of all completions, flat."""
    repeated = [a.prompt for a in answered for _ in a.completions]
    return scorer.score(repeated, [c for a in answered for c in a.completions], step)


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
