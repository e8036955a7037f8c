"""Whether a run has seeds enough (the seed law, rollout/seeds.py), without loading anything."""

from __future__ import annotations

from mm_grpo.errors import ConfigError

TRAINING_SEEDS = 2**30
"""Seeds of training are below this number; those of evaluation are not (the seed law)."""


def check_seed_plan(
    max_steps: int, attempts: int, prompts: int, generations: int, max_turns: int = 1
) -> None:
    """Refuse a run that would need more seeds than there are (the seed law).

    A run plans max_steps x attempts x prompts x generations seeds; there are M, the largest multiple
    of `generations` not above 2^30. The further turns of conversations have 2^30 seeds of their own.
    """
    seeds = TRAINING_SEEDS // generations * generations
    planned = max_steps * attempts * prompts * generations
    if planned > seeds:
        product = f"{max_steps} steps x {attempts} attempts x {prompts} prompts x {generations} generations"
        raise ConfigError(
            f"run.max_steps = {max_steps}: {product} (num_generations) need {planned} seeds, and there are {seeds}"
        )
    if (needed := planned * (max_turns - 1)) > TRAINING_SEEDS:
        product = f"{planned} generations x {max_turns - 1} further turns"
        raise ConfigError(
            f"rollout.max_turns = {max_turns}: {product} need {needed} seeds, and there are {TRAINING_SEEDS}"
        )
