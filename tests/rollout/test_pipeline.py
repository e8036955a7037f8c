"""The parts of what is sampled ahead: versions of answers, ages, gaps at equal versions, threads."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.patience import PATIENCE, until

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import GuardStop
from mm_grpo.learner.step_report import gap_metrics
from mm_grpo.rollout.background import Background
from mm_grpo.rollout.collect import Rollout
from mm_grpo.rollout.engine import Request, Sampling, require_answers
from mm_grpo.rollout.pipeline import Ahead, oldest_version, scheduled_version, staleness_metrics
from mm_grpo.run.inflight_state import pack_ahead, unpack_ahead
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt, Sample


def completion(*spans: tuple[int, int], tokens: int = 6) -> Completion:
    return Completion((1,) * tokens, (-1.0,) * tokens, "a", "stop", 7, spans)


@pytest.mark.parametrize(
    ("spans", "right"),
    [
        (((0, 3),), True),
        (((0, 2), (4, 3)), True),
        (((0, 2), (2, 3), (5, 4)), True),
        (((0, 1),), False),
        (((0, 3), (1, 5)), False),
        (((0, 1), (3, 3)), False),
        (((0, 3), (2, 2)), False),
        (((1, 3),), False),
        (((0, 3), (6, 4)), False),  # the completion has six tokens, 0 to 5
        ((), False),
    ],
)
def test_spans_are_whole_and_of_versions_that_the_engine_had(spans: Any, right: bool) -> None:
    request = Request(
        Prompt(Sample("r:0", ()), (1,), EnginePrompt((), ()), torch.zeros(1), {}), 7, Sampling(6)
    )
    with nullcontext() if right else pytest.raises(GuardStop, match="r:0: seed 7 "):
        require_answers([request], [completion(*spans)], (2, 4))


def test_ages_are_those_of_the_first_token_and_of_what_is_learned_from() -> None:
    groups = [
        Group(0, None, (completion((0, 5)), completion((0, 3), (2, 5)))),  # type: ignore[arg-type]
        Group(1, None, (completion((0, 1)),) * 2),  # type: ignore[arg-type]
        Group(1, None, (completion((0, 4)),) * 2, attempt=1),  # type: ignore[arg-type]
    ]
    rollout = Rollout(6, sampled=groups, stale=2)
    assert staleness_metrics(rollout, 5) == {
        "staleness/mean": (0 + 2 + 1 + 1) / 4,
        "staleness/max": 2,
        "staleness/mixed": 0.25,
        "staleness/dropped": 2,
    }
    assert [oldest_version(group) for group in groups] == [3, 1, 4]
    assert [scheduled_version(step, 0) for step in (1, 2, 3)] == [0, 1, 2]


def test_gaps_are_those_of_the_oldest_version_of_a_completion() -> None:
    engine = [(-1.0, -2.0), (-1.0,), (-3.0, -3.0), (-9.0,)]
    learned = {0: torch.tensor([-1.0, -2.5]), 1: torch.tensor([-4.0]), 2: torch.tensor([-3.0, -3.25])}
    learned[3] = torch.tensor([-1.0])
    metrics, found = gap_metrics(engine, learned, [(2,), (1,), (2,), (1, 2)], Ranks())
    assert metrics["sampling/sampling_logp_difference/mean"] == (3.0 + 8.0 + 0.5 + 0.25) / 6
    assert (found[1].mean, found[1].max) == ((3.0 + 8.0) / 2, 8.0)
    assert (found[2].mean, found[2].max) == ((0.5 + 0.25) / 4, 0.5)


def test_spans_of_versions_outlive_a_checkpoint() -> None:
    prompt = Prompt(Sample("r:0", ()), (1,), EnginePrompt((), ()), torch.zeros(1), {})
    group = Group(0, prompt, (completion((0, 2), (4, 3)),), (1.0,), place=(3, 0))
    kept = pack_ahead(Ahead(groups=[group], slots={3: [0]}, counts={3: {}}), Ranks())
    collector: Any = SimpleNamespace(prompts_at=lambda places: [prompt])
    again = unpack_ahead(kept, collector, None, Ranks())  # type: ignore[arg-type]
    assert again is not None and again.groups[0].completions == group.completions


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
