"""metrics.jsonl: one JSON object a step under TRL's metric names; summary.json at the end of the run; and events.jsonl:
one object for each guard that fired (step, name, action stop or warn, message).

A value that was not measured is None. Infinity and NaN, which JSON cannot hold, are written as "inf", "-inf" and "nan"
(`finite_or_text`), and read as floats again.

A row counts once its line feed, the last byte, is written. If a process is killed or a disk is full in the middle of a
row, readers skip the rest of it, and the next start removes it (`RunFolder.cut_after`).
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
    """Append one row, and wait until it is on the disk.

    Raises ValueError if a value is NaN or infinite or is called step, and TypeError if JSON cannot hold it.
    """
    if "step" in values:
        raise ValueError("'step' is the row's own key; name the metric something else")
    line = json.dumps({"step": step, **values}, allow_nan=False)
    with path.open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def iter_metrics(path: str | PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl, except an unfinished last line. Raises DataError for an illegal line."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_json(line, dict)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}; remove the line") from None
            yield {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def finite_or_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinite values and NaN by texts."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def append_event(path: Path, step: int, name: str, action: str, message: str) -> None:
    """Append one event."""
    line = json.dumps({"step": step, "name": name, "action": action, "message": message}, ensure_ascii=False)
    with path.open("ab") as file:
        file.write(line.encode(errors="replace") + b"\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl or events.jsonl as `iter_metrics` does; [] without a file."""
    return list(iter_metrics(path)) if path.is_file() else []


def cut_events(path: Path, step: int) -> None:
    """Remove the events after `step`, and an unfinished last line."""
    if path.is_file():
        lines = path.read_bytes().splitlines(keepends=True)
        atomic_write(path, b"".join(lines[: sum(event["step"] <= step for event in read_rows(path))]))


def read_summary(paths: RunPaths) -> dict[str, Any] | None:
    """Read summary.json; None if the run has not ended."""
    return read_json(paths.summary, dict) if paths.summary.is_file() else None
