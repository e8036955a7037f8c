"""Gate of a reward with `outcome`: the other rewards pay nothing for an answer that is no success.

Shaped rewards (a format, a length) also distinguish completions that are all wrong. An advantage divided by the group's
deviation is then as large as between right and wrong answers, and a run learns the shape (`phantom_advantage` warns).
The gate makes the contribution of each other reward min(contribution, 0) if the outcome is below its mark: gains are
withheld, penalties stay. GDPO (arXiv:2601.05242) calls this a conditioned reward.

Logged scores are not changed. An outcome that does not apply to a completion (None) gates nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from mm_grpo.errors import RewardError
from mm_grpo.rewards.spec import RewardSpec

ScoresByReward = Mapping[str, Sequence[float | None]]
"""Scores by reward, of the same completions."""


def check_outcomes(specs: Sequence[RewardSpec]) -> None:
    """Raise RewardError if two rewards with `outcome` may apply to one row."""
    for first, second in combinations([spec for spec in specs if spec.options.mark is not None], 2):
        if first.options.may_meet(second.options):
            raise RewardError(
                f"reward {second.name!r}: outcome is set, and is of {first.name!r} too, for the same rows; one reward "
                "says whether a row's answer is right: leave the other, or name different rows with `when`"
            )


def gated(specs: Sequence[RewardSpec], parts: ScoresByReward) -> dict[str, list[float | None]]:
    """Return the scores as they enter totals, not weighted: 0 for a gain that an outcome withholds."""
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
