"""events.jsonl: guards that fired, as they were; a torn or strange line is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import run

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import GuardStop
from mm_grpo.health.guards import Guards
from mm_grpo.rewards import resolve_entries
from mm_grpo.run.events import MOST_BYTES, append_event, cut_events, read_events
from mm_grpo.run.folder import RunFolder


def event(step: int, name: str = "zero_std", message: str = "m") -> dict[str, object]:
    return {"step": step, "name": name, "action": "warn", "message": message}


def test_events_come_back_and_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    for step in (3, 5, 9):
        append_event(path, step, "zero_std", "warn", "m")
    with path.open("a") as file:
        file.write('[1]\n{"step": "x"}\n{"step": 9, "na')
    assert read_events(path) == [event(3), event(5), event(9)]
    cut_events(path, 5)
    assert read_events(path) == [event(3), event(5)] and path.read_text().count("\n") == 2
    append_event(path, 6, "kl", "warn", "a\ud800b")
    assert read_events(path)[-1] == event(6, "kl", "a?b")


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step in range(12):
        append_event(path, step, "zero_std", "warn", "x" * (MOST_BYTES // 8))
    steps = [found["step"] for found in read_events(path)]
    assert steps == list(range(12 - len(steps), 12)) and len(steps) == 7


def test_guards_log_what_fires_also_what_stops(tmp_path: Path) -> None:
    config = GRPOConfig.from_dict(
        {
            "model": {"path": "m"},
            "run": {"guards": {"zero_kl": "warn", "logp_gap": "stop", "zero_std": "off"}},
        }
    )
    folder = RunFolder.create(tmp_path, "x: 1\n")
    guards = Guards(config, resolve_entries(["exact_match"]), folder.append_event)
    guards.apply("zero_kl", "is 0", 4)
    guards.apply("zero_kl", "is 0", 5)  # within WARN_EVERY steps
    guards.apply("zero_std", "none", 5)
    guards.apply("logp_gap", None, 6)
    with pytest.raises(GuardStop):
        guards.apply("logp_gap", "too far", 6)
    assert [(e["step"], e["name"], e["action"]) for e in read_events(folder.paths.events)] == [
        (4, "zero_kl", "warn"),
        (6, "logp_gap", "stop"),
    ]


def test_a_resumed_run_forgets_the_later_events(tmp_path: Path) -> None:
    folder = run(tmp_path)
    for step in (2, 29):
        folder.append_event(step, "zero_std", "warn", "m")
    folder.cut_after(10)
    assert [e["step"] for e in read_events(folder.paths.events)] == [2]
    RunFolder(tmp_path, overwrite=True).start("x: 1\n")
    assert not folder.paths.events.exists()
