"""Isolated rewards: found, told and answering as in the trainer's process; what hangs or dies fails alone."""

import os
import signal
import textwrap
import threading
import time
from dataclasses import replace

import pytest
import rewards_to_isolate as functions
from helpers import tiny
from helpers.patience import PATIENCE, until
from helpers.sessions import died, workers
from reward_entries import FILE, fails, isolated

from mm_grpo.rewards import Scorer
from mm_grpo.rewards.call import WorkerTrace
from mm_grpo.types import Turn

TIMEOUT = 0.8
"""Seconds, in which the calls that do not hang are made, also on a busy machine."""


def ready(scorer):
    """The scorer, when all its workers have imported their functions."""
    scorer.start()
    pools = scorer._pools.values()
    until(lambda: all(len(p.workers) == p.size and all(worker.ready for worker in p.workers) for p in pools))
    return scorer


def counts(scores):
    return tuple(int(scores.metrics[f"rewards/r/{what}"]) for what in ("errors", "timeouts", "none"))


def test_a_worker_gets_what_the_function_asks_for(rows, scorer):
    batch = rows(["abc", "abc"], box=[(1, {2: "two"})] * 2, extra=[[(3,)]] * 2)
    scores = scorer(isolated("echo"), max_steps=9).score(*batch, step=7)
    assert scores.totals == [1.0, 1.0]
    assert scores.metrics["area"] == 2.5
    assert scores.extra == {"seen": [{"box": [1, {"2": "two"}]}] * 2}


def test_a_batch_function_in_a_worker(rows, scorer):
    scores = scorer(isolated("echo_batch")).score(*rows(["abc", "de"], box=[(1, 2), (3, 4)]), step=1)
    assert scores.parts == {"r": [0.5, None]} and scores.metrics["count"] == 2.0
    assert scores.extra == {"first": [1, 3]}


def test_a_worker_gets_videos_of_turns_and_samples(rows, scorer):
    prompts, completions = rows("ab")
    for n, clip in enumerate((tiny.video(1), tiny.video(2, frames=6, fps=3.0))):
        watch = Turn("assistant", "watch", 1), Turn("tool", "", 1, videos=(clip,))
        turns = (*watch, Turn("assistant", "x", 1))
        completions[n] = replace(completions[n], turns=turns)
        sample = replace(prompts[n].sample, videos=(clip,))
        prompts[n] = replace(prompts[n], sample=sample)
    scores = scorer(isolated("watched")).score(prompts, completions, step=1)
    # the seconds, from 1 on, of the last frames that each has
    assert scores.parts == {"r": [1 + 3 / 2 + 2.0, 1 + 5 / 3 + 3.0]}


def test_functions_of_all_kinds_in_workers(rows, scorer, tmp_path):
    (tmp_path / "own.py").write_text(
        "from mm_grpo.rewards import reward\n"
        "@reward('decorated', isolated=True, timeout=5, on_error='mask', weight=2.0)\n"
        "def own(completion):\n    return 4.0\n"
    )
    made = scorer(
        {"name": "length", "isolated": True, "max_length": 2},
        f"{tmp_path}/own.py:own",
        isolated("behave_async", **{"as": "async"}),
        isolated("judge", **{"as": "object"}),
        isolated("Judge", **{"as": "class"}, mark=0.75),
        isolated("process", **{"as": "one", "weight": 0}, max_concurrency=1),
    )
    assert made.specs[1].options.isolated and made.specs[1].options.on_error == "mask"
    scores = made.score(*rows(["a", "none", "abc"]), step=1)
    assert scores.totals == [14.0, 9.0, 13.5] and scores.parts["async"] == [4.0, None, 4.0]
    assert len(set(scores.parts["one"])) == 1 and made._loops.keys() == {True}


def test_calls_are_spread_and_come_back_in_order_with_rows_of_their_own(rows, scorer, tmp_path):
    texts, folder = ["x" * (i % 50) for i in range(100)], [str(tmp_path)] * 100
    entries = [isolated("length_of"), isolated("lengths_of", **{"as": "b"}), isolated("meets", **{"as": "m"})]
    entries.append(isolated("pops", **{"as": "p"}))
    answers = ["a", "b", "c"]
    scores = scorer(*entries).score(*rows(texts, folder=folder, answers=[answers] * 100), step=1)
    assert scores.parts["r"] == scores.parts["b"] == [float(len(text)) for text in texts]
    assert scores.parts["m"] == [1.0] * 100  # two processes were in the function at the same time
    assert scores.parts["p"] == [2.0] * 100 and answers == ["a", "b", "c"]


def test_nothing_that_a_worker_makes_is_unpickled(rows, scorer, tmp_path):
    mark = tmp_path / "mark"
    code = f"""
        import os
        class Trap(Exception):
            def __reduce__(self):
                return os.system, ("touch {mark}",)
        class Float(float):
            __reduce__ = Trap.__reduce__
        def f(completion, log_extra):
            if completion == "raises":
                raise Trap("caught")
            if completion == "logs":
                log_extra("seen", Trap("logged"))
            return Float(0.5) if completion == "float" else 1.0 if completion == "logs" else Trap()
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(code))
    entry = {"name": f"{tmp_path}/own.py:f", "as": "r", "isolated": True, "timeout": 20, "on_error": "mask"}
    scores = scorer(entry).score(*rows(["raises", "returns", "float", "logs"]), step=1)
    assert scores.totals == [None, None, 0.5, 1.0] and type(scores.totals[2]) is float
    assert scores.extra == {"seen": [None, None, None, "Trap('logged')"]}
    for text, message in (
        ("raises", "raised Trap: caught at"),
        ("returns", r"returned Trap\(\), a Trap; legal"),
    ):
        with fails(message):
            scorer({**entry, "on_error": "stop"}).score(*rows([text]), step=1)
    assert not mark.exists()


def test_bad_answers_and_exceptions_read_as_without_isolation(rows, scorer):
    entry = isolated("behave")
    with fails("^reward 'r', on row 'row:1' with the completion 'nan', returned nan, which is not finite"):
        scorer(entry).score(*rows(["a", "nan"]), step=1)
    with fails(r"on a batch of 2 completions .* returned 1 scores; legal is a list of 2"):
        scorer(isolated("wrong_count")).score(*rows("xy"), step=1)
    with fails(r"raised RewardError: log_metric\('m'\) got nan"):
        scorer(isolated("bad_log")).score(*rows("x"), step=1)
    line = next(i for i, text in enumerate(FILE.read_text().splitlines(), 1) if "raise Opaque" in text)
    blamed = rf"on row 'row:0' with the completion 'opaque', raised Opaque: .* at {FILE}:{line}\."
    with fails(blamed) as caught:
        scorer(entry).score(*rows(["opaque"]), step=1)
    assert isinstance(caught.value.__cause__, WorkerTrace) and "in behave" in str(caught.value.__cause__)


ENDS = {
    "exit": "ended its worker process, which exited with code 3",
    "sys.exit": "raised SystemExit: 0",
    "interrupt": "raised KeyboardInterrupt at ",
    "forges": "ended its worker process, which sent what is no answer",
}


@pytest.mark.slow
def test_all_kinds_of_failure_in_one_step(rows, scorer, caplog):
    made = ready(scorer(isolated("behave", on_error="mask", timeout=TIMEOUT)))
    texts = [*ENDS, "loop", "sleep in C", "nan", "none", *"abcdefgh"]
    start = time.perf_counter()
    scores = made.score(*rows(texts), step=2)
    assert TIMEOUT <= time.perf_counter() - start < TIMEOUT + PATIENCE
    assert scores.totals == [None] * (len(ENDS) + 4) + [4.0] * 8
    assert counts(scores) == (len(ENDS) + 1, 2, 1)
    assert f"{len(ENDS) + 1} completions masked at step 2: reward 'r', on row 'row:" in caplog.text


def test_a_failure_stops_the_run_by_default_without_waiting_for_the_others(rows, scorer, end="exit"):
    made, start = scorer(isolated("behave", timeout=600)), time.perf_counter()
    with fails(f"^reward 'r', on row 'row:1' with the completion '{end}', {ENDS[end]}"):
        made.score(*rows(["a", end, "loop"]), step=1)
    assert time.perf_counter() - start < PATIENCE
    assert made.score(*rows(["a"] * 4), step=2).totals == [4.0] * 4


@pytest.mark.slow
def test_calls_behind_many_that_hang_are_made(rows, scorer):
    made = ready(scorer(isolated("behave", on_timeout="mask", timeout=1.6)))
    texts = ["loop", "sleep in C", "loop", "loop", "loop"] + ["a"] * 10
    start = time.perf_counter()
    scores = made.score(*rows(texts), step=1)
    assert 1.6 <= time.perf_counter() - start < PATIENCE
    assert scores.totals == [None] * 5 + [4.0] * 10 and counts(scores) == (0, 5, 0)
    assert made.score(*rows(["a"] * 8), step=2).totals == [4.0] * 8 and len(workers()) == 2


@pytest.mark.slow
def test_a_time_out_stops_the_run_by_default(rows, scorer):
    with fails("^reward 'r', on row 'row:1' with the completion 'loop', had not answered .*; 2 of 4 calls"):
        ready(scorer(isolated("behave", timeout=TIMEOUT))).score(*rows(["a", "loop", "loop", "b"]), step=1)


def test_workers_killed_between_steps_are_replaced(rows, scorer):
    made = ready(scorer(isolated("behave")))
    started = workers()
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    assert died(started)
    assert made.score(*rows(["a"] * 4), step=2).totals == [4.0] * 4


def test_a_file_that_changed_since_the_start_is_not_run(rows, scorer, tmp_path):
    (tmp_path / "own.py").write_text("def f(completion):\n    return 1.0\n")
    made = scorer({"name": f"{tmp_path}/own.py:f", "isolated": True})
    (tmp_path / "own.py").write_text("def f(completion):\n    return 2.0\n")
    with fails("a worker process cannot import .*own.py:f: .*has changed"):
        made.score(*rows("x"), step=1)


def in_main(completion):
    return 1.0


in_main.__module__ = "__main__"


@pytest.mark.parametrize("fn", [lambda completion: 1.0, in_main, functions.Judge()])
def test_functions_that_no_other_process_finds_are_refused_at_the_start(fn):
    with fails("reward 'own' cannot be isolated: .*path/to/file.py:function"):
        Scorer([{"name": fn, "as": "own", "isolated": True}])


def test_values_that_cannot_be_sent(rows, scorer):
    with fails("reward 'behave' cannot be isolated: its setting 'label' is <unlocked _thread.lock"):
        Scorer([{"name": f"{FILE}:behave", "isolated": True, "label": threading.Lock()}])
    with fails("reward 'r': its argument 'label' cannot be sent to a worker process"):
        scorer(isolated("behave")).score(*rows("x", label=[threading.Lock()]), step=1)
