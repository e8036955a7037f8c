"""Less the mean of the others in the group (REINFORCE leave-one-out: Kool et al. 2019; Ahmadian et al. 2024).

    A[p, g] = r[p, g] - mean of r[p, h] over h != g = (r[p, g] - mean_p) * n / (n - 1)

n counts the rewards of the group that are there. The baseline of a completion does not depend on the
completion, so the estimate is unbiased (arXiv:2402.14740), and nothing divides it. No
departures; the papers' penalty against the reference policy is `algorithm.kl_in_reward`.
"""

from __future__ import annotations

from mm_grpo.algorithm.advantages.groups import Rewards, centred, filled, present, require_finite


def rloo(rewards: Rewards) -> list[tuple[float, ...]]:
    """Advantages [P][G] of rewards [P][G].

    Raises ValueError for a reward that is not finite.
    """
    require_finite(rewards)
    advantages = []
    for row in rewards:
        n = len(present(row))
        factor = n / (n - 1) if n > 1 else 0.0
        advantages.append(filled([None if d is None else d * factor for d in centred(row)]))
    return advantages
