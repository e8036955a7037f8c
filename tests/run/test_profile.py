"""`run.profile`: spans that nest, a table whose shares add up, and torch's trace of an update."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from helpers.small_runs import HELDOUT, ROWS, config_for, rows_of, vowels

from mm_grpo import GRPOTrainer, timing
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.profile import Profile, phases_of
from mm_grpo.timing import span, timed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    yield made
    assert timing._recorder is None


def step(clock: Clock, rollout: float, forward: float) -> None:
    """A step that also takes 1 s of learner beside the forward, 2 s between phases and 3 s of metrics after it."""
    times: dict[str, float] = {}
    with timed(times, "step_time"):
        with timed(times, "time/rollout"):
            clock.now += rollout
        clock.now += 2
        with timed(times, "time/learner"):
            for _ in range(2):
                with span("forward"):
                    clock.now += forward / 2
            clock.now += 1
    with span("metrics"):
        clock.now += 3
    assert times == {
        "time/rollout": rollout, "time/learner": forward + 1, "step_time": rollout + forward + 3
    }  # fmt: skip


def test_each_moment_is_counted_once(clock: Clock, tmp_path: Path) -> None:
    profile = Profile(True, RunPaths(tmp_path), 2)
    with span("time/eval"):  # before it begins
        clock.now += 50
    shown: list[str] = []
    profile.start()
    step(clock, 10, 4)
    beside = Thread(target=lambda: span("making a prompt")(lambda: None)())
    beside.start()
    beside.join()
    step(clock, 6, 2)
    clock.now += 1
    profile.stop(shown.append)
    with span("time/eval"):
        clock.now += 50
    # 22 in steps, of which 4 between phases, 2 x 3 of metrics and 1 after them
    assert profile.recorder is not None
    assert phases_of(profile.recorder.seconds) == [
        (("generation",), 16.0, 16 / 35, 2),
        (("learner",), 8.0, 8 / 35, 2),
        (("learner", "forward"), 6.0, 6 / 35, 4),
        (("learner", "the rest"), 2.0, 2 / 35, 0),
        (("writing metrics",), 6.0, 6 / 35, 2),
        (("the rest",), 5.0, 5 / 35, 0),
    ]
    found = profile.summary()["profile"]
    assert (found["seconds"], found["steps"]) == (35.0, 2)
    assert found["phases"][2] == {"phase": "learner/forward", "seconds": 6.0, "share": 0.1714, "times": 4}
    lines = shown[0].splitlines()
    assert lines[0] == "35.0 s in 2 steps"
    assert [line.split() for line in lines[2:5]] == [
        ["generation", "16.00", "8.000", "45.7%"],
        ["learner", "8.00", "4.000", "22.9%"],
        ["forward", "6.00", "3.000", "17.1%"],
    ]
    assert lines[4].startswith("  forward")


@pytest.fixture(scope="module")
def profiled(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    async def judge(completion: str) -> float:
        await asyncio.sleep(0.02)
        return 0.0

    folder = tmp_path_factory.mktemp("runs") / "profiled"
    run = {"max_steps": 2, "eval_every": 2, "save_every": 2, "profile": "torch"}
    config = config_for(models["qwen2_5_vl"], folder, run=run)
    GRPOTrainer(config, train=ROWS, eval=HELDOUT, rewards=[vowels, judge]).train()
    return folder


def test_the_profile_of_a_run(profiled: Path) -> None:
    found = json.loads((profiled / "summary.json").read_text())["profile"]
    rows = rows_of(profiled)[1:]
    own = {phase["phase"]: phase["seconds"] for phase in found["phases"]}
    assert found["steps"] == 2
    top = [phase for phase in found["phases"] if "/" not in phase["phase"]]
    assert sum(phase["share"] for phase in top) == pytest.approx(1, abs=2e-3)
    assert sum(phase["seconds"] for phase in top) == pytest.approx(found["seconds"], abs=2e-3)
    for phase, metric in (
        ("generation", "time/rollout"), ("learner", "time/learner"), ("waiting for rewards", "time/rewards"),
        ("weight sync and its checks", "time/sync"), ("sight", "time/sight"), ("evaluation", "time/eval"),
    ):  # fmt: skip
        assert own[phase] == pytest.approx(sum(row.get(metric, 0) for row in rows), abs=5e-3), phase
    assert own["evaluation"] > own["evaluation/generation"] > 0 and own["checkpoint"] > 0
    parts = ("forward", "backward", "optimizer", "the rest")
    assert sum(own[f"learner/{part}"] for part in parts) == pytest.approx(own["learner"], abs=1e-3)
    assert own["waiting for rewards/waiting for async rewards"] > 0.02
    assert sum(row["step_time"] for row in rows) + own["evaluation"] < found["seconds"]


def test_torchs_trace_is_of_one_update(profiled: Path) -> None:
    events = json.loads((profiled / "torch_trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    assert "aten::mm" in names and any("Backward" in name for name in names)
