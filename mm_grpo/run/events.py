"""events.jsonl: the guards that fired, one object each: step, name, action (stop or warn) and message.

A guard warns at most every 50 steps, so the file stays short; a reader looks at its end alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mm_grpo.files import atomic_write, parse_json

MOST_BYTES = 1 << 18
"""Of the end of the file that `read_events` looks at."""


def append_event(path: Path, step: int, name: str, action: str, message: str) -> None:
    """Write one event, as metrics.jsonl is written: it counts once its line feed is there."""
    line = json.dumps({"step": step, "name": name, "action": action, "message": message}, ensure_ascii=False)
    with path.open("ab") as file:
        file.write(line.encode(errors="replace") + b"\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The newest events; lines that are none are left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MOST_BYTES))
        lines = file.read().split(b"\n")[1 if size > MOST_BYTES else 0 : -1]
    return [event for line in lines if (event := _event(line)) is not None]


def cut_events(path: Path, step: int) -> None:
    """Forget the events after `step`, and a line that a killed process left unfinished."""
    if path.is_file():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (event := _event(line)) is not None and event["step"] <= step]
        if kept != lines:
            atomic_write(path, b"".join(kept))


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    texts = ("name", "action", "message")
    ok = isinstance(event, dict) and isinstance(event.get("step"), int)
    return event if ok and all(isinstance(event.get(key), str) for key in texts) else None
