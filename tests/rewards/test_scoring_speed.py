"""What scoring costs beside the rewards' own work, and what worker processes gain."""

import time
from pathlib import Path

import pytest

from mm_grpo.rewards import Scorer

FILE = Path(__file__).with_name("rewards_to_isolate.py")
ROWS = 2048


def seconds(scorer, batch):
    start = time.perf_counter()
    scorer.score(*batch, step=1)
    return time.perf_counter() - start


@pytest.mark.parametrize(
    "name, limit",
    [
        ("lengths_of", 20e-6),  # 11 on a quiet machine, most of it copies of rows
        ("length_of", 20e-6),  # 7
    ],
)
def test_scoring_costs_little_beside_the_reward(rows, name, limit):
    prompts, completions = rows(["x" * 200] * (ROWS // 8), answer=["3"] * (ROWS // 8))
    batch = [p for p in prompts for _ in range(8)], [c for c in completions for _ in range(8)]
    scorer = Scorer([f"{FILE}:{name}"])

    def cpu_seconds():  # another program's share of the machine is no cost of ours
        start = time.process_time()
        scorer.score(*batch, step=1)
        return time.process_time() - start

    assert min(cpu_seconds() for _ in range(5)) / ROWS < limit


@pytest.mark.parametrize("name", ["lengths_of", "length_of"])
def test_a_worker_costs_little_more(rows, name):
    prompts, completions = rows(["x" * 200] * (ROWS // 8), answer=["3"] * (ROWS // 8))
    batch = [p for p in prompts for _ in range(8)], [c for c in completions for _ in range(8)]
    scorer = Scorer([{"name": f"{FILE}:{name}", "isolated": True}], workers=2)
    best = min(seconds(scorer, batch) for _ in range(5)) / ROWS
    scorer.close()
    assert best < 100e-6  # 20 on a quiet machine
