"""Rewards that hang, die, eat memory or raise what cannot be sent: the step ends, and the counts are right."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer

FILE = Path(__file__).with_name("rewards_to_isolate.py")
TIMEOUT = 1.5


def fails(match: str):
    return pytest.raises(RewardError, match=match)


def children() -> dict[int, str]:
    """The processes that this one started and has not reaped: their state (Z is a zombie) by pid."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if int(parent) == os.getpid():
            found[int(folder.name)] = state
    return found


def processes_of(session: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


@pytest.fixture
def scorer():
    """A scorer with two workers, and a look that none is left and nothing unreaped."""
    made, before = [], children()

    def make(name="behave", **settings):
        entry = {"name": f"{FILE}:{name}", "as": "r", "isolated": True, "timeout": TIMEOUT, **settings}
        made.append(Scorer([entry], workers=2))
        made[-1].start()
        made[-1]._pool._prepare(next(iter(made[-1]._pool._tasks.values())), 2 if name == "behave" else 1)
        return made[-1]

    yield make
    for one in made:
        assert "Z" not in {state for pid, state in children().items() if pid not in before}
        one.close()
    assert children().keys() <= before.keys()


def timed(made, batch, step=1):
    """The scores, and the seconds that they took."""
    start = time.perf_counter()
    scores = made.score(*batch, step=step)
    return scores, time.perf_counter() - start


def counts(scores):
    return tuple(int(scores.metrics[f"rewards/r/{what}"]) for what in ("errors", "timeouts", "none"))


@pytest.mark.parametrize("hang", ["loop", "sleep in C", "regex"])
def test_a_hang_is_killed_at_the_deadline_and_the_others_count(rows, scorer, hang):
    made = scorer(on_error="mask")
    batch = rows(["a", hang, "none", "b"] + ["c"] * 20)
    for step in (1, 2) if hang == "loop" else (1,):
        scores, seconds = timed(made, batch, step)
        assert TIMEOUT <= seconds < TIMEOUT + 1
        assert scores.totals == [4.0, None, None, 4.0] + [4.0] * 20
        assert counts(scores) == (0, 1, 1)


@pytest.mark.parametrize("hangs", [5, 40])
def test_however_many_calls_hang(rows, scorer, hangs):
    timeout = 10.0 if hangs == 5 else TIMEOUT  # further workers need a moment to start
    made = scorer(on_timeout="mask", timeout=timeout)
    scores, seconds = timed(
        made, rows(["loop", "sleep in C"] * (hangs // 2) + ["loop"] * (hangs % 2) + ["a"] * 10)
    )
    assert timeout <= seconds < timeout + 1
    if hangs == 5:  # they made the calls behind those that hang
        assert scores.totals == [None] * hangs + [4.0] * 10
        assert counts(scores) == (0, hangs, 0)
    else:
        assert scores.totals[:hangs] == [None] * hangs and counts(scores)[1] >= hangs
        assert counts(scores)[1] == scores.totals.count(None)
    after, _ = timed(made, rows(["a"] * 8))
    assert after.totals == [4.0] * 8


def test_a_time_out_stops_the_run_by_default(rows, scorer):
    made = scorer()
    start = time.perf_counter()
    with fails(
        r"^reward 'r', on row 'row:1' with the completion 'loop', had not answered after timeout = 1.5 s; 2 of 4 "
        r"calls had not. Give the reward a longer timeout, or set on_timeout: mask to go on without"
    ):
        made.score(*rows(["a", "loop", "loop", "b"]), step=1)
    assert time.perf_counter() - start < TIMEOUT + 1


def test_a_batch_that_hangs(rows, scorer):
    made = scorer("behave_batch", on_timeout="mask")
    scores, seconds = timed(made, rows(["a", "loop", "b"]))
    assert scores.totals == [None] * 3 and counts(scores) == (0, 3, 0)
    assert TIMEOUT <= seconds < TIMEOUT + 1


ENDS = {
    "exit": "ended its worker process, which exited with code 3",
    "segfault": "ended its worker process, which was ended by SIGSEGV",
    "memory": r"raised MemoryError \(memory_limit is 1000000000 bytes\) at ",
    "opaque": r"raised Opaque: \('opaque', <unlocked _thread.lock",
    "mute": "raised Mute: its message cannot be shown",
    "sys.exit": "raised SystemExit: 0",
    "interrupt": "raised KeyboardInterrupt at ",
}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_a_call_ends_that_call_alone(rows, scorer, end, caplog):
    made = scorer(on_error="mask", memory_limit="1GB", timeout=20)
    texts = ["a"] * 30
    texts[11] = texts[12] = end
    for step in (1, 2):
        scores, seconds = timed(made, rows(texts), step)
        assert seconds < 10
        assert scores.totals == [4.0] * 11 + [None] * 2 + [4.0] * 17
        assert counts(scores) == (2, 0, 0)
    assert "2 completions masked at step 2: reward 'r', on row 'row:11'" in caplog.text
    strict = scorer(memory_limit=10**9, timeout=20)
    with fails(f"^reward 'r', on row 'row:1[12]' with the completion '{end}', {ENDS[end]}"):
        strict.score(*rows(texts), step=1)


def test_everything_at_once(rows, scorer):
    made = scorer(on_error="mask", on_timeout="mask", memory_limit="1GB")
    texts = [*ENDS, "loop", "sleep in C", "regex", "nan", "none", *"abcdefgh"]
    scores, seconds = timed(made, rows(texts))
    assert seconds < TIMEOUT + 1
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


def test_slow_calls_are_no_hangs(rows, scorer):
    # Each takes longer than the pool's patience (1.5 s / 8); the others do not wait for them, and all count.
    scores, seconds = timed(scorer(), rows(["wait 0.8", "wait 0.8"] + ["wait 0.05"] * 10))
    assert scores.totals == [4.0] * 12 and seconds < TIMEOUT


def test_max_concurrency_bounds_the_workers(rows, scorer):
    made = scorer("process", max_concurrency=1)
    assert len(set(made.score(*rows(["a"] * 30), step=1).parts["r"])) == 1


def test_a_worker_killed_between_steps_is_replaced(rows, scorer):
    made = scorer()
    for worker in made._pool.workers:
        os.kill(worker.pid, signal.SIGKILL)
    while not all(worker.poll() for worker in made._pool.workers):
        time.sleep(0.01)
    assert made.score(*rows(["a"] * 4), step=1).totals == [4.0] * 4


def test_what_a_reward_started_ends_with_its_worker(rows, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import os, subprocess, sys, time\n"
        "def f(completion):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "    open(os.path.join(os.path.dirname(__file__), 'session'), 'w').write(str(os.getsid(0)))\n"
        "    time.sleep(1000)\n"
    )
    made = Scorer([{"name": f"{own}:f", "isolated": True, "timeout": 1, "on_timeout": "mask"}], workers=1)
    assert made.score(*rows("x"), step=1).totals == [None]
    end, session = time.monotonic() + 5, int((tmp_path / "session").read_text())
    while processes_of(session) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes_of(session) == []
    made.close()


def test_a_scorer_that_is_dropped_leaves_no_process(rows):
    before = children()
    made = Scorer([{"name": f"{FILE}:behave", "isolated": True}], workers=2)
    made.score(*rows("ab"), step=1)
    assert len(children().keys() - before.keys()) == 2
    del made
    gc.collect()
    assert children().keys() <= before.keys()


ORPHAN = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from mm_grpo.rewards import Scorer
from mm_grpo.rewards.worker import Job
scorer = Scorer([{{"name": {str(FILE)!r} + ":behave", "isolated": True, "timeout": 1000}}], workers=1)
scorer.start()
task = next(iter(scorer._pool._tasks.values()))
scorer._pool._prepare(task, 1)
print(scorer._pool.workers[0].pid, flush=True)
how = sys.argv[1]
if how == "killed":
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
if how != "ends":
    scorer._pool.run(task, [Job(0, 1, {{"completion": "sleep in C"}})])
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_workers_end_with_the_trainer(how):
    done = subprocess.run([sys.executable, "-c", ORPHAN, how], capture_output=True, text=True)
    assert done.returncode == (0 if how == "ends" else -signal.SIGKILL), done.stderr
    end, pid = time.monotonic() + 5, int(done.stdout)
    while processes_of(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes_of(pid) == []
