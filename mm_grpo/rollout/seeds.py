"""The seed law: one explicit seed for every generation of a run.

    seed = (offset(run_seed) + ((step * A + attempt) * P + slot) * G + g) mod M

P prompts per step, G generations per prompt, A the bound on attempts, M the largest multiple of G not
above 2^30 and offset a multiple of G. Hence, within a run of at most M / (A * P * G) steps:

- no two generations share a seed (the sum counts every (step, attempt, slot, g) once);
- the seeds of a group are consecutive, so one engine request for n = G generations obeys the law;
- nothing about ranks, replicas, engines or batch splits enters, so neither does it change a sample.

Evaluation draws from [2^30, 2^31 - 2^10), which training never reaches, each set from another part.

In a conversation of several turns these are the seeds of the first turn, 0. Turn t > 0 of a generation has

    2^31 + (n * (max_turns - 1) + t - 1)               n the generation's number, from 0: (seed - offset) mod M
    2^31 + 2^30 + (m * (max_turns - 1) + t - 1) mod 2^30    in evaluation, m = seed - 2^30

so no two turns of a run share a seed either. The start refuses a run with more turns than 2^30 in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm_grpo.errors import ConfigError

TRAIN_SEEDS = 1 << 30
TURN_SEEDS = 1 << 30
EVAL_SEEDS = (1 << 31) - (1 << 10) - TRAIN_SEEDS
# 2^64 / golden ratio: neighbouring run seeds land far apart
_MIX = 0x9E3779B97F4A7C15


def _offset(run_seed: int, span: int, multiple: int) -> int:
    """Return a multiple of `multiple` in [0, span), fixed by `run_seed`."""
    mixed = ((run_seed + 1) * _MIX) % (1 << 64)
    return (mixed >> 16) % (span // multiple) * multiple


@dataclass(frozen=True)
class SeedPlan:
    """Seeds of one run. Raises ConfigError when the run has more generations than seeds."""

    run_seed: int
    prompts: int
    generations: int
    attempts: int
    max_steps: int
    max_turns: int = 1

    def __post_init__(self) -> None:
        total = self.max_steps * self.attempts * self.prompts * self.generations
        if total > self._modulus:
            product = (
                f"{self.max_steps} steps x {self.attempts} attempts x {self.prompts} prompts x {self.generations} "
                "generations"
            )
            raise ConfigError(
                f"run.max_steps = {self.max_steps}: {product} need {total} seeds, and there are {self._modulus}"
            )
        if (needed := total * (self.max_turns - 1)) > TURN_SEEDS:
            raise ConfigError(
                f"rollout.max_turns = {self.max_turns}: {total} generations x {self.max_turns - 1} further turns "
                f"need {needed} seeds, and there are {TURN_SEEDS}"
            )

    def group(self, step: int, slot: int, attempt: int = 0) -> range:
        """Return the G consecutive seeds of one group. `step` counts from 1, `slot` and `attempt` from 0."""
        if not (1 <= step <= self.max_steps and 0 <= slot < self.prompts and 0 <= attempt < self.attempts):
            raise ValueError(
                f"(step {step}, attempt {attempt}, slot {slot}) is outside the plan: steps 1 to "
                f"{self.max_steps}, attempts below {self.attempts}, slots below {self.prompts}"
            )
        # modulus and offset are multiples of G, so a group never straddles the end of the range
        modulus = self._modulus
        position = ((step - 1) * self.attempts + attempt) * self.prompts + slot
        offset = _offset(self.run_seed, modulus, self.generations)
        first = (offset + position * self.generations) % modulus
        return range(first, first + self.generations)

    def of_turn(self, seed: int, turn: int) -> int:
        """Return the seed of turn `turn`, from 0, of the generation that began with `seed`; evaluation's too."""
        if not 0 <= turn < self.max_turns:
            raise ValueError(f"turn {turn} is outside the plan of {self.max_turns}")
        if turn == 0:
            return seed
        if seed >= TRAIN_SEEDS:
            number, start = seed - TRAIN_SEEDS, 2 * TRAIN_SEEDS + TURN_SEEDS
        else:
            number = (seed - _offset(self.run_seed, self._modulus, self.generations)) % self._modulus
            start = 2 * TRAIN_SEEDS
        return start + (number * (self.max_turns - 1) + turn - 1) % TURN_SEEDS

    @property
    def _modulus(self) -> int:
        return TRAIN_SEEDS // self.generations * self.generations


def eval_seeds(run_seed: int, index: int, generations: int, part: int = 0, parts: int = 1) -> range:
    """Return consecutive seeds for the `index`-th row of an evaluation set, the same at every evaluation of a run.

    The sets of a run share the range out: set number `part` of `parts` draws from its own part.
    """
    span = EVAL_SEEDS // parts // generations * generations
    first = (_offset(run_seed, span, generations) + index * generations) % span
    start = TRAIN_SEEDS + part * (EVAL_SEEDS // parts) + first
    return range(start, start + generations)
