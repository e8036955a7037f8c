"""The fork server of the tests: its processes end as those of an interpreter do, and never outlive a test."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import processes

FOREVER = "import os, time; print(os.getpid(), os.fork() and 'parent', flush=True); time.sleep(600)"


def pids_in(output: Path) -> list[int]:
    """The two processes of FOREVER, once both have written their line."""
    end = time.monotonic() + 60
    while len(lines := output.read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    return [int(line.split()[0]) for line in lines]


def wait_for_the_end_of(pids: list[int]) -> None:
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cwd").exists() for pid in pids):  # a zombie has none
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("print('done')", 0, "done"),
        ("raise SystemExit(3)", 3, ""),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("import atexit, sys; atexit.register(print, 'at exit'); sys.exit('words')", 1, "at exit"),
        ("import os; print(os.environ['MINE'], 'WORLD_SIZE' in os.environ, os.getcwd())", 0, "mine False"),
        ("import sys; print(sys.argv, len(sys.modules) > 3000)", 0, "['-c', 'first'] True"),
    ],
)
def test_a_program_ends_as_in_an_interpreter(code: str, status: int, words: str, tmp_path: Path) -> None:
    found, said = processes.finished(["-c", code, "first"], tmp_path / "said.txt", MINE="mine")
    assert found == status and words in said, said


def test_random_numbers_differ_between_processes(tmp_path: Path) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    said = [processes.finished(["-c", code], tmp_path / str(i))[1].split() for i in (0, 1)]
    assert len({*said[0], *said[1]}) == 4


def test_a_killed_process_and_those_that_it_started(tmp_path: Path) -> None:
    process = processes.start(["-c", FOREVER], tmp_path / "said.txt", processes.alone())
    pids = pids_in(tmp_path / "said.txt")
    assert process.pid in pids and os.getpgid(pids[0]) == os.getpgid(pids[1]) == process.pid
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert process.poll() is None
    process.end()
    assert process.returncode == -signal.SIGKILL
    wait_for_the_end_of(pids)


def test_a_process_that_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    process = processes.start(["-c", FOREVER], tmp_path / "said.txt", processes.alone())
    pids = pids_in(tmp_path / "said.txt")
    del process  # its channel closes
    wait_for_the_end_of(pids)


@pytest.mark.slow
def test_a_deadline_that_passes(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no end after 1\.0 s"):
        processes.finished(["-c", FOREVER], tmp_path / "said.txt", deadline=1.0)
    said = (tmp_path / "said.txt").read_text().splitlines()  # of both processes, unless the machine is busy
    wait_for_the_end_of([int(line.split()[0]) for line in said])
