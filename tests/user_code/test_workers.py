"""Worker processes: what comes of a call, and that nothing of them is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from helpers.patience import PATIENCE
from helpers.sessions import died, session, stat, workers

from mm_grpo.errors import ToolError
from mm_grpo.user_code import server
from mm_grpo.user_code import workers as module
from mm_grpo.user_code.workers import Outcome, Workers

HERE = Path(__file__).parent
TARGET = "calls_to_isolate:make"
TIMEOUT = 1.0
"""Seconds of a call that hangs; the others have 60."""
Make = Callable[..., Workers]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Workers] = []

    def group(load: str = "", count: int = 1, most: int = 10_000) -> Workers:
        monkeypatch.setattr("mm_grpo.user_code.workers.LONGEST_ANSWER", most)
        made.append(Workers(TARGET, load, "the calls", lambda how: ToolError(f"a worker {how}")))
        for _ in range(count):
            made[-1].start()
        return made[-1]

    yield group
    started = workers()
    for one in made:
        one.close()
    assert died(started)


def ready(group: Workers) -> Workers:
    while not all(worker.ready for worker in group):
        assert group.wait() == []
    return group


def call(group: Workers, text: str, seconds: float = PATIENCE) -> Outcome:
    """What comes of a call of the first worker."""
    (worker, *_) = ready(group)
    worker.call(text.encode(), time.monotonic() + seconds)
    while not (found := group.wait()):
        pass
    assert found[0].worker is worker
    return found[0]


DEATHS = {
    "exit": "exited with code 3",
    "kill": "was ended by SIGKILL (out of memory?)",
    "segfault": "was ended by SIGSEGV",
    "fork holds on": "exited with code 4",
    "closes": "closed its connection",
    "huge answer": "sent 18446744073709551615 bytes, which is no answer",
}
HANGS = ("hang", "hang in C", "deaf", "stop", "half an answer")


def outcomes(make: Make, calls: Collection[str], seconds: float) -> dict[str, Outcome]:
    """What comes of these calls, each in a worker of its own, of which none is left."""
    group = ready(make(count=len(calls)))
    places, asked = workers(), dict(zip(group, calls, strict=True))
    for worker, how in asked.items():
        worker.call(how.encode(), time.monotonic() + seconds)
    found: dict[str, Outcome] = {}
    while len(found) < len(calls):
        found |= {asked[outcome.worker]: outcome for outcome in group.wait()}
    assert len(group) == 0 and len(places) == len(calls) and died(places)
    return found


def test_workers_that_die_in_a_call(make: Make) -> None:
    found = outcomes(make, DEATHS, PATIENCE)
    assert {how: outcome.died for how, outcome in found.items()} == DEATHS
    assert not any(outcome.late for outcome in found.values())


@pytest.mark.slow
def test_calls_that_hang_are_ended_at_their_deadline(make: Make) -> None:
    start = time.monotonic()
    found = outcomes(make, HANGS, TIMEOUT)
    assert all(outcome.late for outcome in found.values())
    assert TIMEOUT <= time.monotonic() - start < TIMEOUT + PATIENCE


def test_a_worker_that_died_between_calls_is_noticed(make: Make) -> None:
    group = make()
    place = int(call(group, "where").answer or 0)
    os.kill(place, signal.SIGKILL)
    (outcome,) = group.wait()
    assert outcome.died == "was ended by SIGKILL (out of memory?)" and len(group) == 0


@pytest.mark.parametrize(
    ("load", "how"),
    [("raises", "RuntimeError: no such thing"), ("dies", "exited with code 7"), ("hangs", r"within 0\.5 s")],
)
def test_a_worker_that_cannot_start(make: Make, monkeypatch: pytest.MonkeyPatch, load: str, how: str) -> None:
    monkeypatch.setattr(module, "START_LIMIT", 0.5 if load == "hangs" else PATIENCE)
    group = make(load)
    with pytest.raises(ToolError, match=how):
        while True:
            group.wait()


def test_calls_larger_than_a_sockets_buffer(make: Make) -> None:
    assert call(make(most=10), "x" * 10**7).answer == b"10000000"


def test_workers_hold_nothing_of_trainers(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GIVEN", "later")
    monkeypatch.syspath_prepend("/somewhere")
    monkeypatch.chdir(tmp_path)
    group = make()
    loaded = (call(group, "modules").answer or b"").decode().split()
    assert "mm_grpo" in loaded and {"torch", "transformers", "numpy", "pytest"}.isdisjoint(loaded)
    assert call(group, "environment").answer == f"later {tmp_path} /somewhere".encode()
    assert call(group, "main").answer == b"True"  # where signals and alarms work


def test_what_a_call_started_ends_with_its_worker(make: Make) -> None:
    group = make()
    worker, child = map(int, (call(group, "child").answer or b"").split())
    assert set(session(worker)) == {worker, child}
    group.close()
    assert died([worker, child])


def test_workers_that_are_dropped_end(make: Make) -> None:
    group = Workers(TARGET, "", "the calls", ToolError)
    group.start()
    ready(group)
    started = workers()
    del group
    gc.collect()
    assert len(started) == 1 and died(started)


def test_a_fork_of_the_trainer_leaves_its_workers_alone(make: Make) -> None:
    group = ready(make())
    if (pid := os.fork()) == 0:
        try:
            group.close()
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert call(group, "where").answer


def test_a_server_that_is_killed_takes_its_workers_with_it_and_is_started_anew(make: Make) -> None:
    group = ready(make())
    started = workers()
    assert server._server is not None
    os.kill(server._server.process.pid, signal.SIGKILL)
    assert died(started)
    assert call(group, "where").died == "was ended by SIGKILL (out of memory?)"
    group.start()
    assert call(group, "where").answer


def test_a_lifeline_ends_the_session_of_a_process_or_leaves_it() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
    for leaves in (False, True):
        with subprocess.Popen(command, start_new_session=True) as process:
            lifeline = server.Lifeline(pid=process.pid)
            lifeline.leave() if leaves else lifeline.end()
            if leaves:
                time.sleep(0.3)
                assert stat(process.pid)[0] != "Z"
                process.kill()
            assert process.wait(PATIENCE) == -signal.SIGKILL


TRAINER = f"""
import os, signal, sys, threading, time
sys.path[:0] = [{str(HERE)!r}]
from mm_grpo.user_code.workers import Workers
print("the script runs")
group = Workers("calls_to_isolate:make", "", "the calls", RuntimeError)
def soon(signal):
    threading.Timer(0.5, os.kill, (os.getpid(), signal)).start()
def call(text):
    (worker,) = group
    while not worker.idle:
        group.wait()
    worker.call(text.encode(), time.monotonic() + 1000)
    while not (found := group.wait()):
        pass
    return found[0].answer.decode()
group.start()
"""
ENDS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "killed in a call": ("soon(signal.SIGKILL); call('hang in C')", -signal.SIGKILL),
    "interrupted in a call": ("soon(signal.SIGINT); call('hang')", -signal.SIGINT),
}


def trainer(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAINER + program]
    streams = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return subprocess.run(command, text=True, start_new_session=True, timeout=PATIENCE, **streams)


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_workers_and_what_they_started_end_with_the_trainer(how: str) -> None:
    program, code = ENDS[how]
    done = trainer("print(call('child'), flush=True)\n" + program)
    assert done.returncode == code, done.stderr
    first, processes = done.stdout.splitlines()
    assert first == "the script runs" and died(map(int, processes.split()))


def test_what_a_call_prints_goes_to_the_trainers_standard_error_and_it_reads_nothing() -> None:
    done = trainer("print(call('prints'))")
    assert done.stderr == "a line\nanother\n" and done.stdout == "the script runs\n8\n"
