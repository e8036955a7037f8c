"""The seed law: injective, and consecutive within a group."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.seeds import EVAL_SEEDS, TRAIN_SEEDS, SeedPlan, eval_seeds


def test_the_formula_by_hand() -> None:
    plan = SeedPlan(run_seed=0, prompts=3, generations=4, attempts=2, max_steps=10)
    first = plan.group(1, 0)[0]
    assert first % 4 == 0
    assert list(plan.group(1, 0)) == [first, first + 1, first + 2, first + 3]
    # step 2, attempt 1, slot 2: ((1 * 2 + 1) * 3 + 2) * 4 = 44 further on, mod 2^30
    assert plan.group(2, 2, attempt=1)[0] == (first + 44) % 2**30


@settings(max_examples=60, deadline=None)
@given(
    run_seed=st.integers(0, 2**31),
    prompts=st.integers(1, 24),
    generations=st.integers(2, 9),
    attempts=st.integers(1, 3),
    steps=st.integers(1, 9),
)
def test_a_plan_gives_every_generation_a_seed_of_its_own(
    run_seed: int, prompts: int, generations: int, attempts: int, steps: int
) -> None:
    """Seeds of a group follow each other, and no two groups of a run share one."""
    plan = SeedPlan(run_seed, prompts, generations, attempts, steps)
    groups = [
        plan.group(step, slot, attempt)
        for step in range(1, steps + 1)
        for slot in range(prompts)
        for attempt in range(attempts)
    ]
    assert all(len(group) == generations and group.step == 1 for group in groups)
    seeds = [seed for group in groups for seed in group]
    assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) <= max(seeds) < TRAIN_SEEDS


def test_the_largest_plan_fits_and_one_step_more_is_refused() -> None:
    limit = 2**30 // 6 * 6
    steps = limit // (6 * 1000)
    plan = SeedPlan(5, 1000, 6, 1, steps)
    assert 0 <= plan.group(steps, 999)[-1] < limit
    with pytest.raises(ConfigError, match=f"{(steps + 1) * 6000:,}|{(steps + 1) * 6000}"):
        SeedPlan(5, 1000, 6, 1, steps + 1)
    with pytest.raises(ConfigError, match=r"rollout.max_turns = 9: .* seeds, and there are 1073741824"):
        SeedPlan(run_seed=0, prompts=64, generations=64, attempts=1, max_steps=50_000, max_turns=9)


def test_run_seeds_give_other_seeds_and_evaluation_stays_apart() -> None:
    plans = [SeedPlan(s, 4, 8, 1, 100) for s in range(20)]
    assert len({p.group(1, 0)[0] for p in plans}) == 20
    for index in (0, 1, 99, 10**7):
        seeds = eval_seeds(3, index, 4)
        assert seeds[0] >= TRAIN_SEEDS and seeds[-1] < TRAIN_SEEDS + EVAL_SEEDS
    assert TRAIN_SEEDS + EVAL_SEEDS == 2**31 - 2**10
    assert len({eval_seeds(3, i, 4)[0] for i in range(1000)}) == 1000


def test_evaluation_sets_share_no_seed() -> None:
    own = [{s for i in range(500) for s in eval_seeds(9, i, 4, part, 3)} for part in range(3)]
    assert [len(seeds) for seeds in own] == [2000, 2000, 2000] and len(set.union(*own)) == 6000
    assert min(map(min, own)) >= TRAIN_SEEDS and max(map(max, own)) < TRAIN_SEEDS + EVAL_SEEDS
    assert eval_seeds(9, 2**28, 4, 2, 3)[-1] < TRAIN_SEEDS + EVAL_SEEDS


def test_keys_outside_the_plan_are_refused() -> None:
    plan = SeedPlan(0, 4, 8, 1, 10)
    for step, slot, attempt in ((0, 0, 0), (11, 0, 0), (1, 4, 0), (1, 0, 1)):
        with pytest.raises(ValueError, match="outside the plan"):
            plan.group(step, slot, attempt)
