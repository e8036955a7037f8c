"""Success of completions, and the share of a step's advantages that comes from groups without one.

A completion is a success if one reward's score is at least a mark. The reward is the first that applies to it:

1. a reward with `outcome`, and its mark;
2. the reward of `run.headline`, and its mark, or HALF if it has none (`iou mean`);
3. without a headline: the reward of the greatest weight, with HALF.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from mm_grpo.rewards.options import HALF
from mm_grpo.rollout.eval_metric import EvalMetric

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Group


@dataclass(frozen=True)
class Success:
    """Rewards with their marks, the first to decide first."""

    marks: Sequence[tuple[str, float]]
    """(name of a reward, least score of a success)."""

    @classmethod
    def of(cls, config: GRPOConfig, specs: Sequence[RewardSpec]) -> Success:
        """Return what counts as success in a run. ConfigError if `run.headline` names none of its rewards."""
        headline = EvalMetric.of(config, [spec.name for spec in specs])
        outcomes = [(spec.name, mark) for spec in specs if (mark := spec.options.mark) is not None]
        if headline.name is not None:
            return cls([*outcomes, (headline.name, HALF if headline.mark is None else headline.mark)])
        heaviest = sorted((spec for spec in specs if spec.weight > 0), key=lambda spec: -spec.weight)
        return cls([*outcomes, *((spec.name, HALF) for spec in heaviest)])

    def scores(self, group: Group) -> list[tuple[float, bool]]:
        """Return (score, is a success) of each completion that one of the rewards applies to."""
        scores = []
        for at in range(len(group.completions)):
            candidates = ((group.parts[name][at], mark) for name, mark in self.marks)
            scores += [(score, score >= mark) for score, mark in candidates if score is not None][:1]
        return scores

    def share(self, group: Group) -> float | None:
        """Return the share of successes among a group's completions; None if no reward applies to any."""
        scores = self.scores(group)
        return fmean(success for _, success in scores) if scores else None

    def phantom_share(self, groups: Iterable[Group]) -> float | None:
        """Return the share of all |advantages| in groups without a success that differ only in other rewards.

        None if all advantages are 0.
        """
        total = phantom = 0.0
        for group in groups:
            turns = group.turn_advantages or [group.advantages]
            size = sum(abs(advantage) for of_turns in turns for advantage in of_turns)
            total += size
            # scores that differ below the mark (boxes that overlap a little) lead to a success: not phantom
            scores = set(self.scores(group))
            phantom += size if len(scores) == 1 and not any(success for _, success in scores) else 0.0
        return phantom / total if total else None
