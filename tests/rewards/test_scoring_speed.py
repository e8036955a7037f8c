"""What scoring costs beside the rewards' own work, in calls of functions."""

import sys
from pathlib import Path

import pytest

from mm_grpo.rewards import Scorer

FILE = Path(__file__).with_name("rewards_to_isolate.py")


@pytest.fixture
def batch(rows):
    def make(count):
        prompts, completions = rows(["x" * 200] * (count // 8), answer=["3"] * (count // 8))
        return [p for p in prompts for _ in range(8)], [c for c in completions for _ in range(8)]

    return make


def calls_per_row(scorer, batch, count):
    """Calls of Python's and of built-in functions: no other thread and no busy machine changes their number."""
    prompts, completions = batch(count)
    calls = 0

    def note(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        scorer.score(prompts, completions, step=1)
    finally:
        sys.setprofile(None)
    return calls / count


def test_scoring_costs_little_beside_the_reward(batch):
    scorer = Scorer([f"{FILE}:lengths_of"])
    scorer.score(*batch(8), step=1)  # what is done once
    few, many = (calls_per_row(scorer, batch, count) for count in (64, 256))
    assert many < 400  # 273 measured, in 30 us; most of it copies of rows
    assert many < few * 1.05  # linear in the rows
