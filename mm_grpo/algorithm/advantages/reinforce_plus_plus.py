"""Less the group's mean, over the deviation of all such differences (REINFORCE++ with baseline).

    d[p, g] = r[p, g] - mean_p
    A[p, g] = d[p, g] / (std of all d of the step + 1e-4)

Source: Hu 2025, arXiv:2501.03262. One scale for the step, so an easy or hard prompt, whose rewards hardly
differ, is not blown up as under a scale of its group; unlike `scale_rewards: batch`, the differences
between prompts are not part of that scale. Departures: the paper also takes away the mean of d, which
is 0 already, group by group; the deviation counts completions (sample deviation, 1e-4 as elsewhere here),
where verl counts each completion once per token.
"""

from __future__ import annotations

from mm_grpo.algorithm.advantages.groups import EPSILON, Rewards, centred, filled, require_finite, spread


def reinforce_plus_plus_baseline(rewards: Rewards) -> list[tuple[float, ...]]:
    """Advantages [P][G] of rewards [P][G].

    Raises ValueError for a reward that is not finite.
    """
    require_finite(rewards)
    differences = [centred(row) for row in rewards]
    divisor = spread([d for row in differences for d in row]) + EPSILON
    return [filled([None if d is None else d / divisor for d in row]) for row in differences]
