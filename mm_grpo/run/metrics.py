"""The numbers of a run: metrics.jsonl, one JSON object a step under TRL's metric names, and summary.json at its end;
and events.jsonl, the guards that fired, one object each: step, name, action (stop or warn) and message.

A value that was not measured is None. What a step measured as infinite or NaN, which JSON cannot hold, is the text
"inf", "-inf" or "nan" (`finite_or_text`), and a float again for readers.

A file that is only appended to needs no rename to be whole: a row counts once its line feed is there, which is the last
byte written. A process that is killed, or a disk that is full, in the middle of a row leaves what every reader passes
over, and what the next start cuts (`RunFolder.cut_after`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from mm_grpo.errors import DataError
from mm_grpo.files import atomic_write, parse_json, read_json
from mm_grpo.run.paths import RunPaths

Value = float | int | str | bool | None
NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}


def append_row(path: Path, step: int, values: Mapping[str, Value]) -> None:
    """Write one row, in the order given, and wait until the disk has it.

    Raises ValueError when a value is NaN or infinite or is called step, and TypeError for one that JSON cannot hold.
    """
    if "step" in values:
        raise ValueError("'step' is the row's own key; name the metric something else")
    line = json.dumps({"step": step, **values}, allow_nan=False)
    with path.open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; an unfinished last line is left out. DataError names a line that is no object."""
    return list(iter_metrics(path))


def iter_metrics(path: str | PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of `read_metrics`, one after the other: only one of them is held in memory."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _row(line, f"{path}, line {number}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line, dict)
    except ValueError as error:
        raise DataError(f"{where}: {error}; remove the line") from None
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def finite_or_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as a row holds them: a text where one is infinite or NaN."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def append_event(path: Path, step: int, name: str, action: str, message: str) -> None:
    """Write one event."""
    line = json.dumps({"step": step, "name": name, "action": action, "message": message}, ensure_ascii=False)
    with path.open("ab") as file:
        file.write(line.encode(errors="replace") + b"\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run, of which there may be none."""
    return read_metrics(path) if path.is_file() else []


def cut_events(path: Path, step: int) -> None:
    """Forget the events after `step`, and a line that a killed process left unfinished."""
    if path.is_file():
        lines = path.read_bytes().splitlines(keepends=True)
        atomic_write(path, b"".join(lines[: sum(event["step"] <= step for event in read_events(path))]))


def write_summary(paths: RunPaths, summary: Mapping[str, Any]) -> None:
    """Write summary.json, what summary.py says it holds. ValueError when a number is not finite."""
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write(paths.summary, text + "\n")


def read_summary(paths: RunPaths) -> dict[str, Any] | None:
    """What summary.json holds; None when the run has not ended."""
    if not paths.summary.is_file():
        return None
    summary: dict[str, Any] = read_json(paths.summary, dict)
    return summary
