"""What scoring costs beside the rewards' own work, and what worker processes gain."""

import os
import random
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


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two processor cores")
def test_two_workers_score_mathematics_almost_twice_as_fast(rows):
    draw = random.Random(0)
    texts, answers = [], []
    for i in range(4096):
        a, b, power = draw.randint(1, 999), draw.randint(2, 99), draw.randint(1, 9)
        answers.append(rf"\frac{{{a}}}{{{b}}}+x^{power}")
        texts.append(rf"<think>so</think> It is \boxed{{x^{power}+\frac{{{a + i % 2}}}{{{b}}}}}")
    batch = rows(texts, answer=answers)
    one = Scorer([{"name": "math", "isolated": False}])
    two = Scorer([{"name": "math", "isolated": True, "timeout": 200}], workers=2)
    two.start()
    best = {"one": float("inf"), "two": float("inf")}
    for _ in range(3):  # other programs may want a core for a while
        best["one"] = min(best["one"], seconds(one, batch))
        best["two"] = min(best["two"], seconds(two, batch))
        if best["one"] / best["two"] >= 1.7:
            break
    scores = two.score(*batch, step=2)
    two.close()
    assert scores.totals == [1.0 - i % 2 for i in range(4096)]
    print(f"\n{4096 / best['one']:.0f} per second in one process, {4096 / best['two']:.0f} with two workers")
    # 1.7 to 1.9 on two quiet cores; the bound leaves room for a program that takes a share of one, and still
    # tells two workers from one
    assert best["one"] / best["two"] >= 1.3
