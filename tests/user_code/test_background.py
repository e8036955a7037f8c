"""Daemon threads: order, number of threads, the end of the run."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
from helpers.patience import PATIENCE, until

from mm_grpo.background import BackgroundThreads


def test_background_calls_end_with_the_run() -> None:
    thread, go, began = BackgroundThreads(1, "one thread"), threading.Event(), threading.Event()

    def first() -> str:
        began.set()
        assert go.wait(PATIENCE)
        thread.require_open()
        return "never"

    running, waiting = thread.submit(first), thread.submit(lambda: "never")
    assert began.wait(PATIENCE)
    thread.close()
    go.set()
    with pytest.raises(RuntimeError, match="one thread: the run has ended"):
        running.result(PATIENCE)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    with pytest.raises(RuntimeError, match="the run has ended"):
        thread.submit(lambda: "never")
    until(lambda: not any(t.name.startswith("one thread") for t in threading.enumerate()))


def test_a_thread_starts_only_when_none_is_idle() -> None:
    threads = BackgroundThreads(8, "few threads")
    for number in range(20):
        assert threads.submit(pow, number, exp=2).result(PATIENCE) == number**2
        until(lambda: threads._unfinished == 0)
    assert list(threads.map(str, range(3))) == ["0", "1", "2"]
    assert sum(t.name.startswith("few threads") for t in threading.enumerate()) <= 3
    threads.close()
