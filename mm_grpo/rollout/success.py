"""Which completions are a success, and what of a step's advantages comes from groups without one.

Success is a score of at least a mark: by the reward with `outcome` that applies to the completion; else by that of
`run.headline`, whose mark is HALF where it has none (`iou mean`); without a headline by the reward of the greatest
weight that applies, with HALF.
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
    """Rewards by name with their marks; of those that apply to a completion the first decides."""

    marks: Sequence[tuple[str, float]]

    @classmethod
    def of(cls, config: GRPOConfig, specs: Sequence[RewardSpec]) -> Success:
        """What counts as success in a run. ConfigError where `run.headline` names none of its rewards."""
        headline = EvalMetric.of(config, [spec.name for spec in specs])
        outcomes = [(spec.name, mark) for spec in specs if (mark := spec.options.mark) is not None]
        if headline.name is not None:
            return cls([*outcomes, (headline.name, HALF if headline.mark is None else headline.mark)])
        heaviest = sorted((spec for spec in specs if spec.weight > 0), key=lambda spec: -spec.weight)
        return cls([*outcomes, *((spec.name, HALF) for spec in heaviest)])

    def scores(self, group: Group) -> list[tuple[float, bool]]:
        """Of each completion that such a reward applies to its score, and whether it is a success."""
        found = []
        for at in range(len(group.completions)):
            known = ((group.parts[name][at], mark) for name, mark in self.marks)
            found += [(score, score >= mark) for score, mark in known if score is not None][:1]
        return found

    def share(self, group: Group) -> float | None:
        """The share of a group's completions that are a success; None where that applies to none."""
        scores = self.scores(group)
        return fmean(success for _, success in scores) if scores else None

    def phantom_share(self, groups: Iterable[Group]) -> float | None:
        """The share of all |advantages| that lies in groups without a success, whose other rewards alone differ.

        Of a group whose scores differ below the mark (boxes that overlap a little) the advantages are not counted: they
        lead there. None where all advantages are 0.
        """
        total = phantom = 0.0
        for group in groups:
            turns = group.turn_advantages or [group.advantages]
            size = sum(abs(advantage) for of_turns in turns for advantage in of_turns)
            total += size
            scores = set(self.scores(group))
            phantom += size if len(scores) == 1 and not any(success for _, success in scores) else 0.0
        return phantom / total if total else None
