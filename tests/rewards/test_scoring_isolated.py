"""Isolated rewards that behave: found, told and answering as they would in the trainer's process."""

import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import rewards_to_isolate as functions
from worker_processes import pids

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer, resolve_entry, reward
from mm_grpo.rewards.call import WorkerTrace

FILE = Path(__file__).with_name("rewards_to_isolate.py")


def fails(match: str):
    return pytest.raises(RewardError, match=match)


def isolated(name, **settings):
    return {"name": f"{FILE}:{name}", "as": "r", "isolated": True, "timeout": 20, **settings}


@pytest.fixture
def scorer():
    made = []

    def make(*entries, **settings):
        made.append(Scorer(entries, workers=2, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_worker_gets_what_the_function_asks_for(rows, scorer):
    batch = rows(["abc", "abc"], box=[(1, {2: "two"})] * 2, extra=[[(3,)]] * 2)
    scores = scorer(isolated("echo"), max_steps=9).score(*batch, step=7)
    assert scores.totals == [1.0, 1.0]
    assert scores.metrics["area"] == 2.5
    assert scores.extra == {"seen": [{"box": [1, {"2": "two"}]}] * 2}


def test_what_a_function_changes_of_a_row_no_other_call_sees(rows, scorer):
    answers = ["a", "b", "c"]
    scores = scorer(isolated("pops")).score(*rows(list("wxyz") * 4, answers=[answers] * 16), step=1)
    assert scores.totals == [2.0] * 16 and answers == ["a", "b", "c"]


def test_a_batch_function_in_a_worker(rows, scorer):
    scores = scorer(isolated("echo_batch")).score(*rows(["abc", "de"], box=[(1, 2), (3, 4)]), step=1)
    assert scores.parts == {"r": [0.5, None]} and scores.metrics["count"] == 2.0
    assert scores.extra == {"first": [1, 3]}


def test_an_async_function_in_a_worker(rows, scorer):
    made = scorer(isolated("behave_async"))
    assert made.score(*rows(["a", "none", "b"]), step=1).totals == [4.0, None, 4.0]
    assert made._loop is None


@pytest.mark.parametrize("name", ["judge", "Judge"])
def test_objects_and_classes_in_a_worker(rows, scorer, name):
    settings = {"mark": 0.75} if name == "Judge" else {}
    scores = scorer(isolated(name, **settings)).score(*rows("x"), step=1)
    assert scores.totals == [0.75 if name == "Judge" else 0.25]


def test_functions_given_in_python_are_found_by_module_and_name(rows, scorer):
    settings = {"as": "r", "isolated": True, "timeout": 20}
    made = scorer({"name": functions.process, **settings})
    for step in (1, 2):
        assert set(made.score(*rows("wxyz"), step=step).parts["r"]) <= set(pids(made)) - {os.getpid()}
    assert len(made._pool.workers["r"].context.processes) == 2  # the same processes serve all steps


def test_built_ins_and_decorated_functions(rows, scorer, tmp_path):
    (tmp_path / "own.py").write_text(
        textwrap.dedent(
            """
            from mm_grpo.rewards import reward

            @reward("decorated", isolated=True, timeout=5, on_error="mask", weight=2.0)
            def own(completion):
                return 4.0
            """
        )
    )
    made = scorer({"name": "length", "isolated": True, "max_length": 2}, f"{tmp_path}/own.py:own")
    assert made.specs[1].options.isolated and made.specs[1].options.on_error == "mask"
    assert made.score(*rows(["abc", "ab"]), step=1).totals == [8.5, 9.0]


def test_many_calls_are_spread_and_come_back_in_order(rows, scorer):
    texts = ["x" * (i % 50) for i in range(500)]
    scores = scorer(isolated("length_of"), isolated("lengths_of", **{"as": "b"})).score(*rows(texts), step=1)
    assert scores.parts["r"] == scores.parts["b"] == [float(len(text)) for text in texts]


def test_two_workers_are_at_work_at_the_same_time(rows, scorer, tmp_path):
    folders = [str(tmp_path)] * 2
    assert scorer(isolated("meets", timeout=60)).score(*rows(["a", "b"], folder=folders), step=1).totals == [
        1.0,
        1.0,
    ]


@pytest.mark.slow
def test_mathematics_in_two_workers(rows, scorer):
    answers = [rf"\frac{{{i}}}{{7}}+x^{i % 3}" for i in range(1, 65)]
    texts = [rf"It is \boxed{{x^{i % 3}+\frac{{{i + i % 2}}}{{7}}}}" for i in range(1, 65)]
    scores = scorer({"name": "math", "isolated": True, "timeout": 60}).score(
        *rows(texts, answer=answers), step=1
    )
    assert scores.totals == [1.0 - i % 2 for i in range(1, 65)]


def test_a_function_that_prints_and_reads_scores_all_the_same(rows, scorer):
    assert scorer(isolated("behave")).score(*rows(["print", "read"]), step=1).totals == [4.0, 0.0]


def test_a_bad_score_reads_as_it_does_without_isolation(rows, scorer):
    message = (
        "^reward 'r', on row 'row:1' with the completion 'nan', returned nan, which is not finite.*; legal is"
    )
    for entry in (isolated("behave"), isolated("behave", isolated=False)):
        with fails(message):
            scorer(entry).score(*rows(["a", "nan"]), step=1)
    with fails(r"on a batch of 2 completions .* returned 1 scores; legal is a list of 2"):
        scorer(isolated("wrong_count")).score(*rows("xy"), step=1)
    with fails(r"raised RewardError: log_metric\('m'\) got nan"):
        scorer(isolated("bad_log")).score(*rows("x"), step=1)


def test_an_exception_reads_as_it_does_without_isolation(rows, scorer):
    line = next(i for i, text in enumerate(FILE.read_text().splitlines(), 1) if "raise Opaque" in text)
    message = (
        rf"on row 'row:0' with the completion 'opaque', raised Opaque: .* at {FILE}:{line}\. The function"
    )
    for entry in (isolated("behave"), isolated("behave", isolated=False)):
        with fails(message) as caught:
            scorer(entry).score(*rows(["opaque"]), step=1)
    with fails("raised Mute: its message cannot be shown at") as caught:
        scorer(isolated("behave")).score(*rows(["mute"]), step=1)
    assert isinstance(caught.value.__cause__, WorkerTrace) and "in behave" in str(caught.value.__cause__)


def test_workers_import_as_the_trainer_does(rows, scorer, tmp_path, monkeypatch):
    (tmp_path / "own_package_of_rewards.py").write_text(
        "import os\ndef f(completion):\n    return float(os.environ.get('PYTHONPATH') == 'given')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "given")
    made = scorer({"name": "own_package_of_rewards:f", "isolated": True})
    assert made.score(*rows("x"), step=1).totals == [1.0]
    sys.modules.pop("own_package_of_rewards")


def test_a_file_that_changed_since_the_start_is_not_run(rows, scorer, tmp_path):
    (tmp_path / "own.py").write_text("def f(completion):\n    return 1.0\n")
    made = scorer({"name": f"{tmp_path}/own.py:f", "isolated": True})
    (tmp_path / "own.py").write_text("def f(completion):\n    return 2.0\n")
    with fails(
        r"a worker process cannot import .*own.py:f: RuntimeError: the file has changed since the trainer"
    ):
        made.score(*rows("x"), step=1)


def test_a_worker_that_dies_at_import_stops_the_run(rows, scorer, tmp_path):
    code = """
        import multiprocessing, os
        if multiprocessing.parent_process() is not None:
            os._exit(7)
        def f(completion):
            return 1.0
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(code))
    made = scorer({"name": f"{tmp_path}/own.py:f", "isolated": True})
    with fails("a worker process exited with code 7 while it started or imported .*own.py:f"):
        made.score(*rows("x"), step=1)


def test_start_has_the_workers_ready(rows, scorer):
    made = scorer(isolated("process"), isolated("lengths_of", **{"as": "b"}))
    made.start()
    assert [len(group.context.processes) for group in made._pool.workers.values()] == [2, 1]
    started = pids(made)
    for group in made._pool.workers.values():
        group.check()
    scores = made.score(*rows("wxyz"), step=1)
    assert set(scores.parts["r"]) <= set(started) and pids(made) == started


def test_scoring_from_another_thread(rows, scorer):
    made, found = scorer(isolated("length_of")), []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(made.score(*rows(["ab"]), step=1).totals))
        thread.start()
        thread.join()
    assert found == [[2.0], [2.0]]


# what cannot be isolated -------------------------------------------------------------------------


def in_main(completion):
    return 1.0


in_main.__module__ = "__main__"


@pytest.mark.parametrize(
    "fn",
    [
        lambda completion: 1.0,
        functools.partial(functions.behave, label="x"),
        in_main,
        functions.Judge(),
        functions.Judge().__call__,
    ],
)
def test_functions_that_no_other_process_finds_are_refused_at_the_start(fn):
    with fails(
        "reward 'own' cannot be isolated: a worker process imports its function, and a lambda, a closure, .* "
        "Put it into a file of its own and name it as path/to/file.py:function or package.module:function, or "
        r"leave out isolated \(then a time-out stops the run\)"
    ):
        Scorer([{"name": fn, "as": "own", "isolated": True}])


def test_an_isolated_closure_is_refused_at_the_start():
    @reward("inner", isolated=True)
    def inner(completion):
        return 1.0

    with fails("reward 'inner' cannot be isolated"):
        Scorer(["inner"])


def test_a_setting_that_cannot_be_sent_is_refused_at_the_start():
    with fails(
        "reward 'behave' cannot be isolated: its setting 'label' is <unlocked _thread.lock .*Set plain"
    ):
        Scorer([{"name": f"{FILE}:behave", "isolated": True, "label": threading.Lock()}])


def test_a_column_that_cannot_be_sent_is_named(rows, scorer):
    with fails(
        "reward 'r': its argument 'label' cannot be sent to a worker process .*isolated rewards take plain"
    ):
        scorer(isolated("behave")).score(*rows("x", label=[threading.Lock()]), step=1)


def test_a_script_is_not_run_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            from mm_grpo.rewards import Scorer
            print("ran")
            def own(completion):
                return 1.0
            if __name__ == "__main__":
                for entry in (own, __file__ + ":own"):
                    try:
                        Scorer([{"name": entry, "isolated": True}])
                    except Exception as error:
                        print(error)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.count("reward 'own' cannot be isolated") == 2


def test_classes_that_cannot_serve():
    with fails(r"rewards: '.*:Opaque' is a class whose objects cannot be called; give it __call__"):
        resolve_entry(f"{FILE}:Opaque")
    with fails(r"has no setting 'marks'; did you mean 'mark'"):
        resolve_entry({"name": f"{FILE}:Judge", "marks": 1})


@pytest.mark.slow
def test_a_clock_that_is_set_forward_ends_no_call(rows, scorer, tmp_path, monkeypatch):
    file = tmp_path / "slow.py"
    file.write_text("import time\n\ndef slow(completion):\n    time.sleep(1)\n    return 1.0\n")
    made = scorer({"name": f"{file}:slow", "isolated": True, "timeout": 20})
    made.start()
    clock = time.time
    timer = threading.Timer(0.4, lambda: monkeypatch.setattr(time, "time", lambda: clock() + 86400))
    timer.start()
    assert made.score(*rows(["a", "b"]), step=1).totals == [1.0, 1.0]
    timer.join()
