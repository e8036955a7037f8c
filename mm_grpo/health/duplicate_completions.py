"""Duplicate completions: the sign of seeds that repeat.

Equal completions are healthy when the policy is sure of its answer and a fault when two generations
drew the same noise. The engine's own log-probabilities tell the two apart. A completion of
probability p that stands k times among G independent samples is no surprise while k is near G * p; the
chance of k - 1 or more further copies is a binomial tail, and a fault drives it to practically 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mm_grpo.types import Completion, Group

THRESHOLD = 1e-9
"""Chance below which repetition is called a fault: far under one false alarm in a million groups."""


def duplicate_completions(groups: Sequence[Group], threshold: float = THRESHOLD) -> str | None:
    """A message when some group repeats a completion beyond what its probability allows, else None."""
    for group in groups:
        counts = Counter(c.token_ids for c in group.completions)
        for completion in group.completions:
            copies = counts[completion.token_ids]
            chance = copies_chance(completion, copies, len(group.completions))
            if copies > 1 and chance < threshold:
                return _message(group, completion, copies, chance)
    return None


def unique_ratio(groups: Sequence[Group]) -> float:
    """Distinct completions over completions, averaged over the groups; 1 when none repeats."""
    ratios = [len({c.token_ids for c in g.completions}) / len(g.completions) for g in groups]
    return sum(ratios) / len(ratios) if ratios else 1.0


def copies_chance(completion: Completion, copies: int, generations: int) -> float:
    """P(at least `copies` - 1 of the other `generations` - 1 samples equal this completion)."""
    p = math.exp(min(0.0, math.fsum(completion.logprobs)))
    n = generations - 1
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(copies - 1, n + 1))


def _message(group: Group, completion: Completion, copies: int, chance: float) -> str:
    seeds = [c.seed for c in group.completions if c.token_ids == completion.token_ids]
    probability = math.exp(math.fsum(completion.logprobs))
    return (
        f"{group.prompt.uid}: {copies} of {len(group.completions)} completions are the same "
        f"{len(completion.token_ids)} tokens ({completion.text[:60]!r}), though the policy gives them probability "
        f"{probability:.2g}; independent samples do this with chance {chance:.1g}. Seeds of the copies: {seeds}. "
        "Likely the engine shared one generator or ignored its "
        "seeds; compare the seeds above with those of the other groups in the rollout log"
    )
