"""Rewards of turns to advantages of turns: discounted returns, compared turn by turn.

A departure from GRPO, which has one advantage for a completion; off by default (`algorithm.turn_gamma`). Of turn t of
generation g, whose rewards are r[g, t] (one of a whole conversation is that of its last turn),

    R[g, t] = sum over k >= t of  turn_gamma^(k - t) * r[g, k]          the return from that turn on
    A[g, t] = the estimator's advantage of R[g, t] among R[h, t] of the generations h that have a turn t

so with `advantage_estimator: grpo` A[g, t] = (R[g, t] - mean over h of R[h, t]) / (std over h of R[h, t] + 1e-4).

Why the same turn of the others, and not all turns of the group: returns at different turns have different sizes for
reasons that no action has (fewer rewards are left, less is discounted). Normalising each turn over the group is
MT-GRPO's (Zeng et al. 2025, arXiv:2505.11821); the discounted return is that of GiGPO (Feng et al. 2025,
arXiv:2505.10978) as verl-agent has it. Departures: MT-GRPO adds the whole conversation's normalised reward to the
turn's, where here both are in one return; GiGPO compares steps that began in the same state of the environment.
A turn that a single generation has reached has nothing
to be compared with, and advantage 0.

Axes: [P][G][K], P groups of G generations with K turns each, which differs between generations.
"""

from __future__ import annotations

from collections.abc import Sequence

from mm_grpo.algorithm.advantages import advantages
from mm_grpo.config import AlgorithmConfig

TurnRewards = Sequence[Sequence[Sequence[float | None]]]
"""Rewards [P][G][K]; None where no reward applies to the turn, or to the conversation."""


def discounted_returns(rewards: Sequence[float | None], gamma: float) -> list[float | None]:
    """Returns [K] of one conversation's rewards [K]; None where no reward applies to the turn or to one that it is paid
    for.

    >>> discounted_returns([1.0, None, 2.0], gamma=0.5)
    [1.5, 1.0, 2.0]
    """
    found: list[float | None] = []
    for reward in reversed(rewards):
        later = found[-1] if found and gamma > 0 else None
        if reward is None:
            found.append(None if later is None else gamma * later)
        else:
            found.append(reward if later is None else reward + gamma * later)
    return found[::-1]


def turn_advantages(rewards: TurnRewards, config: AlgorithmConfig) -> list[tuple[tuple[float, ...], ...]]:
    """Advantages [P][G][K] of the turns of P groups, by the config's `turn_gamma`, estimator and scale.

    A scale that is one for the step (`scale_rewards: batch`, `reinforce_plus_plus_baseline`) counts all turns of it.
    Raises ValueError for a reward that is not finite.
    """
    gamma = config.turn_gamma
    if gamma is None:
        raise ValueError("algorithm.turn_gamma is null: there are no advantages of turns")
    returns = [[discounted_returns(turns, gamma) for turns in group] for group in rewards]
    longest = [max(map(len, group), default=0) for group in returns]
    at_turn = [
        [turns[t] if t < len(turns) else None for turns in group]
        for group, most in zip(returns, longest, strict=True)
        for t in range(most)
    ]
    following = iter(advantages(at_turn, config))
    result = []
    for group, most in zip(returns, longest, strict=True):
        found = [next(following) for _ in range(most)]
        result.append(tuple(tuple(found[t][g] for t in range(len(own))) for g, own in enumerate(group)))
    return result
