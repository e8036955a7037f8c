"""Rewards that begin while other completions are still being sampled: which, in what order, and with equal scores."""

import asyncio
import dataclasses
import random
import threading
import time

import pytest
import reward_entries
from helpers.patience import until
from helpers.sessions import workers
from reward_entries import fails

from mm_grpo.rewards import Scorer

TEXTS = ["a", "bb", "none", "dddd", "e", "ffffff"]


def isolated(name, **settings):
    return reward_entries.isolated(name, **{"as": "apart", **settings})


@pytest.fixture
def checked(scorer):
    def make(*entries, columns=(), **settings):
        one = scorer(*entries, **settings)
        one.check(columns)
        return one

    return make


def begun(one, batch, order, columns=(), step=1):
    """Scores of a batch whose completions came in that order."""
    prompts, completions = batch
    streamed_calls = one.begin(len(prompts), columns, step)
    for row in order:
        streamed_calls.add(row, prompts[row], completions[row])
    return one.score(prompts, completions, step, streamed_calls)


async def judged(completion, kind, log_extra, log_metric, trainer_state):
    await asyncio.sleep(0.001 * len(completion))
    log_extra("seen", completion.upper())
    log_metric("length", len(completion))
    return None if completion == "none" else trainer_state.global_step + len(completion) / 8 + kind


def plain(completion):
    return float(len(completion))


def whole(completions, log_metric):
    log_metric("together", len(completions))
    return [float(i) for i, _ in enumerate(completions)]


async def gated(completion):
    return 1.0


def without_times(scores):
    metrics = {name: value for name, value in scores.metrics.items() if not name.startswith("time/")}
    return dataclasses.replace(scores, metrics=metrics)


def test_scores_are_those_of_a_batch_that_is_scored_at_once(rows, checked, tmp_path):
    (tmp_path / "own.py").write_text(
        "def apart(completion, images, box, log_extra, log_metric):\n"
        "    log_extra('pixels', images[0].size)\n    log_metric('boxes', len(box))\n"
        "    return None if completion == 'none' else len(completion) / box[0]\n"
    )
    apart = isolated("behave", weight=0.5) | {"name": f"{tmp_path}/own.py:apart"}
    streamed = [{"name": judged, "as": "judged", "when": {"task": "x"}}, apart, plain, whole]
    entries = [*streamed, {"name": gated, "as": "gated", "only_if": "plain", "weight": 2}]
    columns = {"kind": [0, 1, 2, 0, 1, 2], "box": [(4, 2)] * 6}
    columns["task"] = ["x", "x", "y", "x", "y", "x"]
    batch = rows(TEXTS, **columns)
    want = checked(*entries, columns=columns, max_steps=9).score(*batch, step=3)
    for seed in range(2):
        order = random.Random(seed).sample(range(6), 6)
        one = checked(*entries, columns=columns, max_steps=9)
        got = begun(one, batch, order, columns, step=3)
        assert without_times(got) == without_times(want)
        if seed == 0:  # and again, by the same workers
            assert begun(one, batch, order[::-1], columns, step=3).totals == want.totals
    assert want.parts["apart"] == [0.25, 0.5, None, 1.0, 0.25, 1.5] and want.extra["pixels"] == [[2, 2]] * 6
    assert want.parts["judged"][0] == 3.125 and want.parts["judged"][2] is None


def test_calls_are_made_before_the_others_are_there(rows, checked, tmp_path):
    called = []

    async def noted(completion):
        called.append(completion)
        return 1.0

    (tmp_path / "own.py").write_text(
        f"from pathlib import Path\ndef touch(completion):\n    Path({str(tmp_path)!r}, completion).touch()\n"
        "    return 2.0\n"
    )
    apart = {"name": f"{tmp_path}/own.py:touch", "as": "touch", "isolated": True, "timeout": 20}
    later = []

    def last(completion):
        later.append((threading.current_thread(), completion))
        return 0.0

    one = checked({"name": noted, "as": "noted"}, apart, last)
    prompts, completions = rows(["p", "q", "r"])
    streamed_calls = one.begin(3, (), 1)
    streamed_calls.add(1, prompts[1], completions[1])
    until(lambda: called == ["q"] and (tmp_path / "q").exists())
    streamed_calls.add(0, prompts[0], completions[0])
    until(lambda: called == ["q", "p"] and (tmp_path / "p").exists())
    # a plain function is not called from two threads, nor while the engine works in its own
    assert later == []
    streamed_calls.add(2, prompts[2], completions[2])
    scores = one.score(prompts, completions, 1, streamed_calls)
    assert scores.totals == [3.0] * 3
    assert later == [(threading.current_thread(), text) for text in "pqr"]
    assert 0 < scores.metrics["time/reward/touch"] < 20 and scores.metrics["time/reward/noted"] < 1


@pytest.mark.slow
def test_a_timeout_counts_from_the_last_completion(rows, checked):
    """Sampling that takes longer than a reward's time-out is nobody's fault; a call that hangs is late as ever."""
    one = checked(isolated("behave", on_timeout="mask", timeout=0.6))
    one.start()
    prompts, completions = rows(["wait 0", "wait 600", "wait 0"])
    one.score(prompts[:1], completions[:1], 1)  # workers have started
    streamed_calls = one.begin(3, (), 1)
    for row in (0, 1):
        streamed_calls.add(row, prompts[row], completions[row])
    time.sleep(0.7)
    streamed_calls.add(2, prompts[2], completions[2])
    scores = one.score(prompts, completions, 1, streamed_calls)
    assert [part is None for part in scores.parts["apart"]] == [False, True, False]
    assert (scores.metrics["rewards/apart/timeouts"], scores.metrics["rewards/apart/errors"]) == (1, 0)


def test_what_fails_early_stops_the_run_when_all_are_there(rows, checked):
    batch = rows(["a", "opaque", "c"])
    one = checked(isolated("behave"))
    streamed_calls = one.begin(3, (), 1)
    streamed_calls.add(1, batch[0][1], batch[1][1])
    until(lambda: streamed_calls.runners["apart"]._stopped)
    streamed_calls.add(0, batch[0][0], batch[1][0])
    streamed_calls.add(2, batch[0][2], batch[1][2])
    with fails("reward 'apart', on row 'row:1' with the completion 'opaque', raised"):
        one.score(*batch, 1, streamed_calls)
    assert streamed_calls.over  # and it goes on
    assert begun(one, rows(["a"]), [0]).metrics["rewards/apart/errors"] == 0


def test_calls_that_nobody_waits_for_are_ended(rows, checked):
    cancelled = []

    async def waits(completion):
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(completion)
            raise

    one = checked(isolated("behave"), {"name": waits, "as": "waits"})
    one.start()
    until(lambda: len(workers()) == 2)
    started = workers()
    prompts, completions = rows(["loop", "b"])
    streamed_calls = one.begin(2, (), 1)
    streamed_calls.add(0, prompts[0], completions[0])
    until(lambda: one._pools["apart"].jobs)
    assert one.begin(2, (), 1) is None  # one batch at a time
    streamed_calls.abandon()
    assert cancelled == ["loop"]
    until(lambda: len(set(started) & set(workers())) == 1)  # without the one that was at the call
    assert one.begin(2, (), 1) is not None


def test_where_nothing_can_begin_early(rows, checked):
    one = checked(plain, whole, {"name": gated, "as": "g", "only_if": "plain"})
    assert not one.streams and one.begin(3, (), 1) is None
    assert not Scorer([isolated("echo_batch"), isolated("behave", max_concurrency=1, **{"as": "b"})]).streams
    unchecked = Scorer([judged])
    assert unchecked.streams and unchecked.begin(3, (), 1) is None
    one = checked({"name": gated, "as": "g"})
    streamed_calls = one.begin(3, (), 1)
    with pytest.raises(ValueError, match="1 completions where 3 were begun"):
        one.score(*rows("a"), 1, streamed_calls)
