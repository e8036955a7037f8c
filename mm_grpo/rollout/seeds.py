"""The seed law: one explicit seed for every generation of a run.

    seed = (offset(run_seed) + ((step * A + attempt) * P + slot) * G + g) mod M

P prompts per step, G generations per prompt, A the bound on attempts, M the largest multiple of G not
above 2^30 and offset a multiple of G. Hence, within a run of at most M / (A * P * G) steps:

- no two generations share a seed (the sum counts every (step, attempt, slot, g) once);
- the seeds of a group are consecutive, so one engine request for n = G generations obeys the law;
- nothing about ranks, replicas, engines or batch splits enters, so neither does it change a sample.

Evaluation draws from [2^30, 2^31 - 2^10), which training never reaches, each set from a part of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm_grpo.config import check_seed_plan

TRAIN_SEEDS = 1 << 30
EVAL_SEEDS = (1 << 31) - (1 << 10) - TRAIN_SEEDS
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring run seeds land far apart


def _offset(run_seed: int, span: int, multiple: int) -> int:
    """A multiple of `multiple` in [0, span), fixed by `run_seed`."""
    mixed = ((run_seed + 1) * _MIX) % (1 << 64)
    return (mixed >> 16) % (span // multiple) * multiple


@dataclass(frozen=True)
class SeedPlan:
    """The seeds of one run. Raises ConfigError when the run has more generations than seeds."""

    run_seed: int
    prompts: int
    generations: int
    attempts: int
    max_steps: int

    def __post_init__(self) -> None:
        check_seed_plan(self.max_steps, self.attempts, self.prompts, self.generations)

    def group(self, step: int, slot: int, attempt: int = 0) -> range:
        """The G consecutive seeds of one group. `step` counts from 1, `slot` and `attempt` from 0."""
        if not (1 <= step <= self.max_steps and 0 <= slot < self.prompts and 0 <= attempt < self.attempts):
            raise ValueError(
                f"(step {step}, attempt {attempt}, slot {slot}) is outside the plan: steps 1 to "
                f"{self.max_steps}, attempts below {self.attempts}, slots below {self.prompts}"
            )
        modulus = TRAIN_SEEDS // self.generations * self.generations
        position = ((step - 1) * self.attempts + attempt) * self.prompts + slot
        offset = _offset(self.run_seed, modulus, self.generations)
        first = (offset + position * self.generations) % modulus
        return range(first, first + self.generations)


def eval_seeds(run_seed: int, index: int, generations: int, part: int = 0, parts: int = 1) -> range:
    """Consecutive seeds for the `index`-th row of an evaluation set, the same at every evaluation of a run.

    The sets of a run share the range out: set number `part` of `parts` draws from its own part.
    """
    span = EVAL_SEEDS // parts // generations * generations
    first = (_offset(run_seed, span, generations) + index * generations) % span
    start = TRAIN_SEEDS + part * (EVAL_SEEDS // parts) + first
    return range(start, start + generations)
