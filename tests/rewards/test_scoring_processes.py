"""Worker processes and what they leave behind: children, pickles, orphans, threads of the trainer."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from worker_processes import died, pids, session, stat

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer

FILE = Path(__file__).with_name("rewards_to_isolate.py")

STARTS_CHILD = """
    import os, pathlib, subprocess, sys, time
    def f(completion):
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
        pathlib.Path(__file__).with_name("session").write_text(str(os.getsid(0)))
        if completion == "exits":
            os._exit(3)
        time.sleep(1000 if completion == "hangs" else 0)
        return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "exits", "scores"])
def test_what_a_reward_started_ends_with_its_worker(rows, tmp_path, how):
    (tmp_path / "own.py").write_text(textwrap.dedent(STARTS_CHILD))
    entry = {"name": f"{tmp_path}/own.py:f", "isolated": True, "timeout": 2, "on_error": "mask"}
    made = Scorer([entry], workers=1)
    assert made.score(*rows([how]), step=1).totals == ([1.0] if how == "scores" else [None])
    worker = int((tmp_path / "session").read_text())
    if how == "scores":
        assert len(session(worker)) == 2  # the worker and its child
        made.close()
    assert died([worker])
    made.close()


def test_a_scorer_that_is_dropped_leaves_no_process(rows):
    made = Scorer([{"name": f"{FILE}:behave", "isolated": True}], workers=2)
    made.score(*rows("ab"), step=1)
    workers = pids(made)
    assert len(workers) == 2
    del made
    gc.collect()
    assert died(workers)


def test_a_fork_of_the_trainer_leaves_its_workers_alone(rows):
    made = Scorer([{"name": f"{FILE}:process", "as": "r", "isolated": True}], workers=1)
    before = made.score(*rows("a"), step=1).totals
    if (pid := os.fork()) == 0:
        made._pool.workers["r"].context.processes[0].terminate()
        made.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert made.score(*rows("a"), step=2).totals == before
    made.close()


def test_nothing_that_a_worker_makes_is_unpickled(rows, tmp_path):
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
    made = Scorer([entry], workers=2)
    scores = made.score(*rows(["raises", "returns", "float", "logs"]), step=1)
    assert scores.totals == [None, None, 0.5, 1.0] and type(scores.totals[2]) is float
    assert scores.extra == {"seen": [None, None, None, "Trap('logged')"]}
    for text, message in (
        ("raises", "raised Trap: caught at"),
        ("returns", r"returned Trap\(\), a Trap; legal"),
    ):
        with pytest.raises(RewardError, match=message):
            Scorer([{**entry, "on_error": "stop"}], workers=1).score(*rows([text]), step=1)
    made.close()
    assert not mark.exists()


def test_workers_import_neither_torch_nor_the_trainers_script(tmp_path):
    own, script = tmp_path / "own.py", tmp_path / "train.py"
    own.write_text(
        "import json, sys\n"
        "def f(completion, log_extra):\n"
        "    log_extra('modules', sorted({name.partition('.')[0] for name in sys.modules}))\n"
        "    return 1.0\n"
    )
    script.write_text(
        TRAINER + f"print('imported')\nscores = trained({str(own)!r} + ':f', 'a', close=True)\n"
    )
    script.open("a").write("import json; print(json.dumps(scores.extra['modules'][0]))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    first, modules = done.stdout.splitlines()
    assert first == "imported"
    assert {"mm_grpo", "pebble"} <= set(json.loads(modules))
    assert set(json.loads(modules)).isdisjoint({"torch", "transformers", "datasets", "numpy", "vllm"})


TRAINER = f"""
import os, signal, sys, threading
from mm_grpo.rewards import Scorer
from mm_grpo.types import Completion, EnginePrompt, Prompt, Sample
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from worker_processes import pids

def trained(name, text, close=False, end=None):
    scorer = Scorer([{{"name": name, "as": "r", "isolated": True, "timeout": 1000}}], workers=1)
    scorer.start()
    scorer._pool.workers["r"].check()
    if not close:
        print(*pids(scorer), flush=True)
    if text is None:
        return
    if end is not None:  # in the midst of a call
        threading.Timer(0.2, end).start()
    prompt = Prompt(Sample("row:0", [], (), (), {{}}), (1,), EnginePrompt((1,), ()), None, {{}})
    scores = scorer.score([prompt], [Completion((1,), (0.0,), text, "stop", 0)], step=1)
    if close:
        scorer.close()
    return scores
"""

ENDS = {
    "ends": "None",
    "killed": "lambda: os.kill(os.getpid(), signal.SIGKILL)",
    "killed at once": "lambda: os.killpg(os.getpgid(0), signal.SIGKILL)",
    "terminated": "lambda: os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("how", ENDS)
def test_workers_end_with_the_trainer(how):
    text = None if how == "ends" else "sleep in C"
    code = f"{TRAINER}\ntrained({str(FILE)!r} + ':behave', {text!r}, end={ENDS[how]})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True, timeout=60
    )
    ended = {"ends": 0, "terminated": -signal.SIGTERM}.get(how, -signal.SIGKILL)
    assert done.returncode == ended, done.stderr
    (worker,) = map(int, done.stdout.split())
    assert died([worker])


def test_what_a_worker_has_started_ends_with_a_killed_trainer(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(textwrap.dedent(STARTS_CHILD))
    kill = f"""
def when_called():
    while not os.path.exists({str(tmp_path / "session")!r}):
        threading.Event().wait(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=when_called).start()
"""
    code = f"{TRAINER}\n{kill}\ntrained({str(own)!r} + ':f', 'hangs')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    started = session(int((tmp_path / "session").read_text()))
    assert died(started), started


def test_what_a_function_prints_goes_to_the_trainers_standard_error():
    code = f"{TRAINER}\ntrained({str(FILE)!r} + ':behave', 'print', close=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "a line on standard output\nanother\n" and done.stdout == ""


def test_workers_are_forks_of_one_process_that_has_imported_already():
    """A fork takes 0.02 s, and an interpreter that imports this package 0.3 s."""
    made = [Scorer([{"name": f"{FILE}:behave", "as": "r", "isolated": True}], workers=2) for _ in range(2)]
    workers = []
    for one in made:
        one.start()
        one._pool.workers["r"].check()
        workers += pids(one)
    parents = {int(stat(pid)[1]) for pid in workers}
    assert len(workers) == 4 and len(parents) == 1 and os.getpid() not in parents
    for one in made:
        one.close()
