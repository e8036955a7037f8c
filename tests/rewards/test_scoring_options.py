"""Plain and async functions in the trainer's process, time-outs, policies, gates, options."""

import asyncio
import logging
import re
import threading
from pathlib import Path

import pytest
from helpers.patience import PATIENCE
from reward_entries import fails, named

from mm_grpo import background
from mm_grpo.rewards import Scorer, get, resolve_entry, reward
from mm_grpo.rewards.options import RewardOptions

HERE = Path(__file__).name


def marks(**scores):
    """A reward that scores a completion by its text."""
    return lambda completion: scores[completion]


def test_a_plain_function_with_a_time_out_scores_as_without(rows):
    threads = []

    def f(completion):
        threads.append(threading.current_thread())
        return float(len(completion))

    scorer = Scorer([named("f", f, timeout=5), named("g", f)])
    assert scorer.score(*rows(["a", "bc"]), step=1).parts == {"f": [1.0, 2.0], "g": [1.0, 2.0]}
    assert threads[0] is threads[1] is not threading.main_thread()
    assert threads[2] is threads[3] is threading.main_thread()


@pytest.mark.field_bug("hangs")
def test_a_plain_function_that_hangs_stops_the_run_whatever_the_policy(rows, caplog):
    release = threading.Event()

    def f(completion):
        return release.wait(600) if completion == "b" else 1.0

    with caplog.at_level(logging.INFO):
        scorer = Scorer([named("f", f, timeout=0.5, on_error="mask")])
    assert "reward 'f' runs in the trainer's process" in caplog.text
    with fails("reward 'f', on row 'row:1' .* 'b', had not answered .* = 0.5 s.*isolated: true"):
        scorer.score(*rows("abc"), step=1)
    release.set()


@pytest.mark.slow
def test_an_async_reward_that_is_late_is_cancelled_and_counted(rows, scorer):
    ended = []

    async def f(completion):
        try:
            await asyncio.sleep(600 if completion == "b" else 0)
        finally:
            ended.append(completion)
        return 1.0

    made = scorer(named("f", f, timeout=0.3, on_timeout="mask"))
    scores = made.score(*rows("abc"), step=1)
    assert scores.totals == [1.0, None, 1.0] and sorted(ended) == ["a", "b", "c"]
    found = [scores.metrics[f"rewards/f/{what}"] for what in ("errors", "timeouts", "none")]
    assert found == [0, 1, 0] and 0.3 <= scores.metrics["time/reward/f"] < PATIENCE
    with fails("reward 'f', on row 'row:1' .* had not answered after timeout = 0.2 s; 1 of 3 calls had not"):
        Scorer([named("f", f, timeout=0.2)]).score(*rows("abc"), step=1)


@pytest.mark.slow
def test_an_async_reward_that_blocks_the_loop_stops_the_run(rows, monkeypatch, scorer):
    monkeypatch.setattr(background, "GRACE", 0.4)
    release = threading.Event()

    async def f(completion):
        if completion == "b":
            release.wait(600)
        return 1.0

    made = scorer(named("f", f, timeout=0.1, on_error="mask"))
    with fails(r"async rewards \('f'\): the event loop does not answer"):
        made.score(*rows("abc"), step=1)
    monkeypatch.setattr(background, "GRACE", PATIENCE)
    assert made.score(*rows("a"), step=2).totals == [1.0]  # on a new loop
    release.set()


def test_max_concurrency_of_an_async_reward(rows, scorer, limit=3):
    now, most = 0, 0

    async def f(completion):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return 1.0

    made = scorer(named("f", f, max_concurrency=limit))
    assert made.score(*rows("a" * 10), step=1).totals == [1.0] * 10
    assert most == limit


def test_async_rewards_run_together_beside_the_others_on_one_loop_in_a_running_one(rows, scorer):
    begun, loops, both = [], [], threading.Barrier(2)  # passed only where each runs while the other does

    async def each(completion):
        begun.append(1)
        loops.append(asyncio.get_running_loop())
        while len(begun) < 5:
            await asyncio.sleep(0.05)
        return float(len(completion))

    async def batch(completions, **kwargs):
        await each("")
        await asyncio.to_thread(both.wait, PATIENCE)
        return [1.0 for _ in completions]

    def plain(completions, **kwargs):
        both.wait(PATIENCE)
        return [1.0 for _ in completions]

    made = scorer(named("each", each), named("batch", batch), named("plain", plain))

    async def notebook():
        return made.score(*rows(["x"] * 4), step=1)

    scores = asyncio.run(notebook())
    assert scores.totals == [3.0] * 4 and len(begun) == 5
    assert scores.metrics["time/reward/each"] >= 0.04
    assert made.score(*rows(["x"] * 4), step=2).totals == [3.0] * 4 and len(set(loops)) == 1
    made.close()
    made.close()
    assert loops[0].is_closed() and made.score(*rows(["x"]), step=3).totals == [3.0]


def test_the_first_async_failure_stops_the_others(rows):
    ended, error = [], SystemExit(1)

    async def f(completion):
        if completion == "bad":
            raise error
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(completion)

    line = f.__code__.co_firstlineno + 2
    with fails(rf"on row 'row:1' with the completion 'bad', raised SystemExit: .* at .*{HERE}:{line}") as e:
        Scorer([named("f", f)]).score(*rows(["a", "bad", "b"]), step=1)
    assert e.value.__cause__ is error
    assert ended == ["a", "b"]  # by cancelling, not by the end of their ten minutes


def test_late_calls_may_have_another_policy_than_errors(rows, scorer):
    def bad(completion):
        raise ValueError("no")

    async def late(completion):
        await asyncio.sleep(20)

    made = scorer(named("a", late, timeout=0.1, on_error="mask", on_timeout="stop"))
    with fails("reward 'a', .* had not answered"):
        made.score(*rows("x"), step=1)
    made = scorer(named("a", late, timeout=0.1, on_error="mask"), named("b", bad, on_error="mask"))
    metrics = made.score(*rows("x"), step=1).metrics
    assert (metrics["rewards/a/timeouts"], metrics["rewards/b/errors"]) == (1, 1)


def test_a_gate_decides_where_a_reward_applies(rows):
    asked = []

    def gated(completion):
        asked.append(completion)
        return 10.0

    form = marks(a=1.0, b=0.0, c=-1.0, d=None, e=0.1)  # f fails
    scorer = Scorer([named("g", gated, only_if="form"), named("form", form, on_error="mask")])
    scores = scorer.score(*rows("abcdef"), step=1)
    assert asked == ["a", "e"]
    assert scores.parts["g"] == [10.0, None, None, None, 10.0, None]
    assert scores.totals == [11.0, 0.0, -1.0, None, 10.1, None]
    assert scores.metrics["rewards/g/none"] == 4 and scores.metrics["rewards/g/mean"] == 10.0


@pytest.mark.parametrize(
    "gates, message",
    [
        ({"a": "c", "cc": []}, "reward 'a': only_if is 'c', .*did you mean 'cc'"),
        ({"a": "b", "b": "a"}, "only_if goes in a circle among a, b"),
    ],
)
def test_gates_that_mean_nothing(gates, message):
    with fails(message):
        Scorer([named(name, marks(), only_if=gate) for name, gate in gates.items()])


def test_the_decorator_and_the_entry_take_the_same_options():
    @reward("own", timeout=3, on_error="mask", only_if="format")
    async def own(completion):
        return 1.0

    assert get("own").options == RewardOptions(timeout=3.0, on_error="mask", only_if=("format",))
    options = resolve_entry({"name": "own", "timeout": None, "only_if": [], "max_concurrency": 4}).options
    assert options == RewardOptions(on_error="mask", max_concurrency=4)
    assert get("own").options.timeout == 3.0
    kinds = ({}, {"isolated": True}, {"isolated": True, "timeout": 5})
    assert [RewardOptions(**kind).deadline for kind in kinds] == [None, 120, 5]


@pytest.mark.parametrize(
    "key, value, others, legal",
    [
        ("timeout", 0, {}, "> 0"),
        ("max_concurrency", 0, {}, ">= 1"),
        ("timeot", 3, {}, "timeout"),
        # what does not go together, or what this kind of function cannot have
        ("on_timeout", "mask", {"timeout": 2}, "isolated: true"),
        ("max_concurrency", 2, {}, "isolated: true"),
        ("completions", "text", {}, "take `completions`"),
    ],
)
def test_options_that_are_not_legal(key, value, others, legal):
    with fails(f"(?s)^.*reward 'length'.*{key}.*{re.escape(legal)}"):
        resolve_entry({"name": "length", key: value, **others})
    with fails(f"(?s)^reward 'f': .*{key}.*{re.escape(legal)}"):
        reward("f", **{key: value, **others})(lambda completion: 1.0)
