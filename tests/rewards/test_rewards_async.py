import asyncio
import threading
from pathlib import Path

import pytest
from helpers.patience import PATIENCE

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer

HERE = Path(__file__).name


def fails(match: str):
    return pytest.raises(RewardError, match=match)


def named(name, fn, **settings):
    return {"name": fn, "as": name, **settings}


async def slow(completion):
    await asyncio.sleep(0.05)
    return float(len(completion))


def test_async_rewards_run_together(rows):
    begun = []

    async def all_begun():
        begun.append(1)
        while len(begun) < 21:
            await asyncio.sleep(0.05)

    async def each(completion):
        await all_begun()
        return float(len(completion))

    async def batch(completions, **kwargs):
        await all_begun()
        return [1.0 for _ in completions]

    limit = {"timeout": PATIENCE}
    scorer = Scorer(
        [named("slow", each, **limit), named("batch", batch, **limit), named("b", lambda completion: 1.0)]
    )
    scores = scorer.score(*rows(["x"] * 20), step=1)
    assert scores.totals == [3.0] * 20 and len(begun) == 21
    assert scores.metrics["time/reward/slow"] >= 0.04
    scorer.close()


def test_async_rewards_work_in_a_running_loop(rows):
    async def notebook():
        return Scorer([slow]).score(*rows(["xy"]), step=1)

    assert asyncio.run(notebook()).totals == [2.0]


def test_one_loop_serves_all_steps_and_closes(rows):
    loops, threads = [], []

    async def f(completion):
        loops.append(asyncio.get_running_loop())
        threads.append(threading.current_thread())
        return 1.0

    scorer = Scorer([named("f", f)])
    for step in (1, 2):
        scorer.score(*rows("x"), step=step)
    scorer.close()
    scorer.close()
    assert loops[0] is loops[1] and loops[0].is_closed()
    assert threads[0] is threads[1] is not threading.main_thread() and not threads[0].is_alive()
    assert scorer.score(*rows("x"), step=3).totals == [1.0]
    scorer.close()


def test_the_first_async_failure_stops_the_others(rows, error=SystemExit(1)):  # noqa: B008
    ended = []

    async def f(completion):
        if completion == "bad":
            raise error
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(completion)

    line = f.__code__.co_firstlineno + 2
    with fails(
        rf"on row 'row:1' with the completion 'bad', raised {type(error).__name__}: .* at .*{HERE}:{line}"
    ) as e:
        Scorer([named("f", f)]).score(*rows(["a", "bad", "b"]), step=1)
    assert e.value.__cause__ is error
    assert ended == ["a", "b"]  # by cancelling, not by the end of their ten minutes


def test_a_coroutine_out_of_a_plain_function_is_no_score(rows):
    async def inner():
        return 1.0

    def f(completion):
        return inner()

    with fails(
        "returned <coroutine .*, a coroutine that nobody awaits; write the function with `async def`; legal"
    ):
        Scorer([named("f", f)]).score(*rows("x"), step=1)
