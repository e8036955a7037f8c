"""The gate of a reward with `outcome`: where the answer is no success, the other rewards pay nothing.

Shaped rewards that are added to the one for the answer (a format, a length) tell the completions of a group apart in
which all are wrong, and an advantage that is divided by the group's own deviation is as large there as where answers
differ: a run then learns the shape (`phantom_advantage` warns of it). The gate makes the contribution of each other
reward min(contribution, 0) where the outcome is below its mark. So what would be gained is withheld, and a penalty
stays: a wrong answer is no excuse for a loop. It is what GDPO (arXiv:2601.05242) calls a conditioned reward.

Logged scores stay as they are. An outcome that does not apply to a completion (None) gates nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from mm_grpo.errors import RewardError
from mm_grpo.rewards.spec import RewardSpec

ScoresByReward = Mapping[str, Sequence[float | None]]
"""Scores by reward, of the same completions."""


def check_outcomes(specs: Sequence[RewardSpec]) -> None:
    """RewardError where two rewards with `outcome` may apply to one row, where both would gate."""
    for one, other in combinations([spec for spec in specs if spec.options.mark is not None], 2):
        if one.options.may_meet(other.options):
            raise RewardError(
                f"reward {other.name!r}: outcome is set, and is of {one.name!r} too, for the same rows; one reward "
                "says whether a row's answer is right: leave the other, or name different rows with `when`"
            )


def gated(specs: Sequence[RewardSpec], parts: ScoresByReward) -> dict[str, list[float | None]]:
    """The scores as they enter totals, not weighted: 0 in place of a gain that an outcome withholds."""
    failed = {
        at
        for spec in specs
        if (mark := spec.options.mark) is not None
        for at, score in enumerate(parts[spec.name])
        if score is not None and score < mark
    }

    def entering(spec: RewardSpec, at: int, score: float | None) -> float | None:
        withheld = (
            at in failed and spec.options.mark is None and score is not None and spec.weight * score > 0
        )
        return 0.0 if withheld else score

    return {spec.name: [entering(spec, at, s) for at, s in enumerate(parts[spec.name])] for spec in specs}
