"""events.jsonl: guards that fired, as they were; a torn or strange line is nothing."""

from __future__ import annotations

from pathlib import Path

from mm_grpo.run.events import append_event, cut_events, read_events


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
