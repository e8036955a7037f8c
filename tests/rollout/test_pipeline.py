"""The parts of what is sampled ahead: gaps at equal versions, threads."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
import torch
from helpers.patience import PATIENCE, until

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.step_report import gap_metrics
from mm_grpo.rollout.background import Background


def test_gaps_are_those_of_the_oldest_version_of_a_completion() -> None:
    engine = [(-1.0, -2.0), (-1.0,), (-3.0, -3.0), (-9.0,)]
    learned = {0: torch.tensor([-1.0, -2.5]), 1: torch.tensor([-4.0]), 2: torch.tensor([-3.0, -3.25])}
    learned[3] = torch.tensor([-1.0])
    metrics, found = gap_metrics(engine, learned, [(2,), (1,), (2,), (1, 2)], Ranks())
    assert metrics["sampling/sampling_logp_difference/mean"] == (3.0 + 8.0 + 0.5 + 0.25) / 6
    assert (found[1].mean, found[1].max) == ((3.0 + 8.0) / 2, 8.0)
    assert (found[2].mean, found[2].max) == ((0.5 + 0.25) / 4, 0.5)


def test_background_calls_end_with_the_run() -> None:
    thread, go, began = Background(1, "one thread"), threading.Event(), threading.Event()

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
