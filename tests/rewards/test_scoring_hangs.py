"""Rewards that hang, die, eat memory or raise what cannot be sent: the step ends, and the counts are right."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.patience import PATIENCE
from worker_processes import died, pids

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer, isolation

FILE = Path(__file__).with_name("rewards_to_isolate.py")
TIMEOUT = 2.0
"""Seconds, in which the calls that do not hang are made, also on a busy machine."""


def fails(match: str):
    return pytest.raises(RewardError, match=match)


@pytest.fixture
def scorer():
    """A scorer with two workers that hold its function; of all workers none is left."""
    made = []

    def make(name="behave", **settings):
        entry = {"name": f"{FILE}:{name}", "as": "r", "isolated": True, "timeout": TIMEOUT, **settings}
        made.append(Scorer([entry], workers=2))
        made[-1].start()
        made[-1]._pool.workers["r"].check()
        return made[-1]

    yield make
    for one in made:
        started = pids(one)
        one.close()
        assert died(started)


def timed(made, batch, step=1):
    """The scores, and the seconds that they took."""
    start = time.perf_counter()
    scores = made.score(*batch, step=step)
    return scores, time.perf_counter() - start


def counts(scores):
    return tuple(int(scores.metrics[f"rewards/r/{what}"]) for what in ("errors", "timeouts", "none"))


@pytest.mark.slow
def test_a_hang_is_killed_at_the_deadline_and_the_others_count(rows, scorer):
    made = scorer(on_error="mask")
    batch = rows(["a", "loop", "none", "b"] + ["c"] * 20)
    for step in (1, 2):
        scores, seconds = timed(made, batch, step)
        assert TIMEOUT <= seconds < TIMEOUT + PATIENCE
        assert scores.totals == [4.0, None, None, 4.0] + [4.0] * 20
        assert counts(scores) == (0, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [5, 40])
def test_calls_behind_many_that_hang_are_made(rows, scorer, hangs):
    timeout = 6.0 if hangs == 5 else TIMEOUT  # further workers need a moment to start
    made = scorer(on_timeout="mask", timeout=timeout)
    scores, seconds = timed(
        made, rows(["loop", "sleep in C"] * (hangs // 2) + ["loop"] * (hangs % 2) + ["a"] * 10)
    )
    assert timeout <= seconds < timeout + 15  # one after the other they would take 15 s, and 40 s
    if hangs == 5:  # they made the calls behind those that hang
        assert scores.totals == [None] * hangs + [4.0] * 10
        assert counts(scores) == (0, hangs, 0)
    else:
        assert scores.totals[:hangs] == [None] * hangs and counts(scores)[1] >= hangs
        assert counts(scores)[1] == scores.totals.count(None)
    after, _ = timed(made, rows(["a"] * 8))
    assert after.totals == [4.0] * 8


@pytest.mark.slow
def test_a_time_out_stops_the_run_by_default(rows, scorer):
    made = scorer()
    with fails(
        r"^reward 'r', on row 'row:1' with the completion 'loop', had not answered after timeout = 2 s; 2 of 4 "
        r"calls had not. Give the reward a longer timeout, or set on_timeout: mask to go on without"
    ):
        made.score(*rows(["a", "loop", "loop", "b"]), step=1)


@pytest.mark.slow
def test_a_batch_call_that_hangs_masks_all_its_completions(rows, scorer):
    made = scorer("behave_batch", on_timeout="mask")
    scores, seconds = timed(made, rows(["a", "loop", "b"]))
    assert scores.totals == [None] * 3 and counts(scores) == (0, 3, 0)
    assert TIMEOUT <= seconds < TIMEOUT + PATIENCE


ENDS = {
    "exit": "ended its worker process, which exited with code 3",
    "exit 0": "ended its worker process, which exited with code 0",
    "segfault": "ended its worker process, which was ended by SIGSEGV",
    "memory": r"raised MemoryError \(memory_limit is 1000000000 bytes\) at ",
    "opaque": r"raised Opaque: \('opaque', <unlocked _thread.lock",
    "mute": "raised Mute: its message cannot be shown",
    "sys.exit": "raised SystemExit: 0",
    "interrupt": "raised KeyboardInterrupt at ",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_what_ends_a_call_ends_that_call_alone(rows, scorer, end, caplog):
    made = scorer(on_error="mask", memory_limit="1GB", timeout=120)
    texts = ["a"] * 30
    texts[11] = texts[12] = end
    for step in (1, 2):
        scores, seconds = timed(made, rows(texts), step)
        assert seconds < PATIENCE  # no deadline was waited for
        assert scores.totals == [4.0] * 11 + [None] * 2 + [4.0] * 17
        assert counts(scores) == (2, 0, 0)
    assert "2 completions masked at step 2: reward 'r', on row 'row:11'" in caplog.text
    strict = scorer(memory_limit=10**9, timeout=120)
    with fails(f"^reward 'r', on row 'row:1[12]' with the completion '{end}', {ENDS[end]}"):
        strict.score(*rows(texts), step=1)


@pytest.mark.slow
def test_all_kinds_of_failure_in_one_step(rows, scorer):
    made = scorer(on_error="mask", on_timeout="mask", memory_limit="1GB")
    texts = [*ENDS, "loop", "sleep in C", "regex", "nan", "none", *"abcdefgh"]
    scores, seconds = timed(made, rows(texts))
    assert seconds < TIMEOUT + PATIENCE
    assert scores.totals == [None] * (len(ENDS) + 5) + [4.0] * 8
    assert counts(scores) == (len(ENDS) + 1, 3, 1)


def test_a_call_that_failed_is_made_again(rows, scorer, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import os, pathlib\n"
        "def f(completion):\n"
        f"    tried = pathlib.Path({str(tmp_path)!r}) / completion\n"
        "    if not tried.exists():\n"
        "        tried.write_text('')\n"
        "        os._exit(1) if completion == 'dies' else 1 / 0\n"
        "    return 1.0\n"
    )
    made = Scorer([{"name": f"{own}:f", "as": "r", "isolated": True, "retries": 1, "timeout": 20}], workers=2)
    assert made.score(*rows(["dies", "raises"]), step=1).totals == [1.0, 1.0]
    made.close()


@pytest.mark.slow
def test_slow_calls_are_no_hangs(rows, scorer):
    # Each takes longer than the step's patience (8 s / 8); the others do not wait for them, and all count.
    scores, _ = timed(scorer(timeout=8), rows(["wait 1.2", "wait 1.2"] + ["wait 0.05"] * 10))
    assert scores.totals == [4.0] * 12


@pytest.mark.slow
def test_a_slow_call_among_quick_ones_is_made_alone(rows, scorer, monkeypatch):
    monkeypatch.setattr(isolation, "CHUNK_SECONDS", 5.0)  # however slow the machine
    made = scorer(timeout=8)
    made.score(*rows(["a"] * 300), step=1)
    assert made._pool.chunks["r"] > 1  # the next calls are handed out several at a time
    scores, seconds = timed(made, rows(["a"] * 40 + ["wait 1.5"] + ["a"] * 40), step=2)
    assert scores.totals == [4.0] * 81 and seconds > 1.5


def test_max_concurrency_bounds_the_workers(rows, scorer):
    made = scorer("process", max_concurrency=1)
    assert len(set(made.score(*rows(["a"] * 30), step=1).parts["r"])) == 1


def test_a_worker_killed_between_steps_is_replaced(rows, scorer):
    made = scorer()
    made.score(*rows(["a"] * 4), step=1)
    for wait in (0.0, 0.5):  # before pebble has seen it, and after
        for pid in pids(made):
            os.kill(pid, signal.SIGKILL)
        time.sleep(wait)
        assert made.score(*rows(["a"] * 4), step=2).totals == [4.0] * 4
