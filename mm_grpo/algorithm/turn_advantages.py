"""Rewards of turns to advantages of turns: discounted returns, compared turn by turn.

A departure from GRPO, which has one advantage for a completion; off by default (`algorithm.turn_gamma`). With r[g, t]
the rewards of turn t of generation g (the reward of a whole conversation is that of its last turn),

    R[g, t] = sum over k >= t of  turn_gamma^(k - t) * r[g, k]          the return from that turn on
    A[g, t] = the estimator's advantage of R[g, t] among R[h, t] of the generations h that have a turn t

so with `advantage_estimator: grpo` A[g, t] = (R[g, t] - mean over h of R[h, t]) / (std over h of R[h, t] + 1e-4).

Why the same turn of the others, and not all turns of the group: returns at different turns have different sizes for
reasons that no action has (fewer rewards are left, less is discounted). Normalising each turn over the group is
MT-GRPO's (Zeng et al. 2025, arXiv:2505.11821); the discounted return is that of GiGPO (Feng et al. 2025,
arXiv:2505.10978) as verl-agent has it. Departures: MT-GRPO adds the whole conversation's normalised reward to the
turn's, where here both are in one return; GiGPO compares steps that began in the same state of the environment.
A turn that only one generation has reached has advantage 0.

Axes: [P][G][K], P groups of G generations with K turns each, which differs between generations.
"""

from __future__ import annotations

from collections.abc import Sequence

from mm_grpo.algorithm.advantages import AdvantageOptions, advantages

TurnRewards = Sequence[Sequence[Sequence[float | None]]]
"""Rewards [P][G][K]; None if no reward applies to the turn, or to the conversation."""


def discounted_returns(rewards: Sequence[float | None], gamma: float) -> list[float | None]:
    """Compute the returns [K] of one conversation's rewards [K]; None if no reward applies to the turn or a later one.

    >>> discounted_returns([1.0, None, 2.0], gamma=0.5)
    [1.5, 1.0, 2.0]
    """
    returns: list[float | None] = []
    for reward in reversed(rewards):
        later = returns[-1] if returns and gamma > 0 else None
        if reward is None:
            returns.append(None if later is None else gamma * later)
        else:
            returns.append(reward if later is None else reward + gamma * later)
    return returns[::-1]


def turn_advantages(rewards: TurnRewards, options: AdvantageOptions) -> list[tuple[tuple[float, ...], ...]]:
    """Return advantages [P][G][K] of the turns of P groups, by `turn_gamma`, estimator and scale of `options`.

    A scale of the whole step (`scale_rewards: batch`, `reinforce_plus_plus_baseline`) counts all its turns. Raises
    ValueError for a reward that is not finite.
    """
    gamma = options.turn_gamma
    if gamma is None:
        raise ValueError("algorithm.turn_gamma is null: there are no advantages of turns")
    returns = [[discounted_returns(turns, gamma) for turns in group] for group in rewards]
    longest = [max(map(len, group), default=0) for group in returns]
    at_turn = [
        [turns[t] if t < len(turns) else None for turns in group]
        for group, turn_count in zip(returns, longest, strict=True)
        for t in range(turn_count)
    ]
    rows = iter(advantages(at_turn, options))
    result = []
    for group, turn_count in zip(returns, longest, strict=True):
        by_turn = [next(rows) for _ in range(turn_count)]
        result.append(tuple(tuple(by_turn[t][g] for t in range(len(turns))) for g, turns in enumerate(group)))
    return result
