"""The numbers of a run: metrics.jsonl, one JSON object a step under TRL's metric names, and summary.json at its end.

A row is complete or absent: the last line that a killed process left unfinished is cut when the log
is opened again, and passed over by the reader. A value that was not measured is None. What a step measured as infinite
or NaN, which JSON cannot hold, is the text "inf", "-inf" or "nan" (`finite_or_text`), and a float again for readers.

Opening the log and appending to it cost the same whatever its length. A file that is only appended to needs no
rename to be whole: a row counts once its line feed is there, which is the last byte written, so a process that is
killed, or a disk that is full, in the middle of a row leaves what every reader passes over and the next start cuts.
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
from mm_grpo.types import LARGEST

Value = float | int | str | bool | None
NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}
SUMMARY_KEYS = ("accuracy_before", "accuracy_after", "seconds", "steps", "eval")


class MetricsLog:
    """Appends to a metrics.jsonl; steps only go up."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.last_step = -1
        if self.path.exists():
            line = _cut_torn_line(self.path)
            self.last_step = _row(line, f"{self.path}, last line")["step"] if line else -1

    def append(self, step: int, values: Mapping[str, Value]) -> None:
        """Write one row, in the order given, and wait until the disk has it.

        Raises ValueError when a value is NaN or infinite or when `step` has a row already, and
        TypeError when a value is no plain number, string, bool or None.
        """
        if step <= self.last_step:
            raise ValueError(
                f"step {step} comes after step {self.last_step} in {self.path.name}; steps go up"
            )
        if "step" in values:
            raise ValueError("'step' is the row's own key; name the metric something else")
        line = json.dumps({"step": step, **{k: _checked(step, k, v) for k, v in values.items()}})
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.last_step = step


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; an unfinished last line is left out.

    Raises DataError, naming the line, when any other line is no object with a step.
    """
    return list(iter_metrics(path))


def iter_metrics(path: str | PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of `read_metrics`, one after the other: only one of them is held in memory."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _row(line, f"{path}, line {number}")


def new_rows(path: str | PathLike[str], start: int, limit: int = -1) -> tuple[list[dict[str, Any]], int]:
    """The whole rows of a metrics.jsonl from the byte `start`, and where the next row will begin.

    A reader that comes again reads what was added, and not the whole file. At most about `limit` bytes are read, -1 for
    all: until the row that begins among them ends.
    """
    with Path(path).open("rb") as file:
        file.seek(start)
        data = file.read(limit)
        data += file.readline() if data and not data.endswith(b"\n") else b""
    data = data[: data.rfind(b"\n") + 1]
    rows = [_row(line, f"{path}, after byte {start}") for line in data.splitlines()]
    return rows, start + len(data)


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); remove the line") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(f"{where}: a row is an object with a whole number 'step'")
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def finite_or_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as a row holds them: a text where one is infinite or NaN."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def write_summary(paths: RunPaths, summary: Mapping[str, Any]) -> None:
    """Write summary.json: the SUMMARY_KEYS, and any further keys of JSON values. None stands for "not measured".

    `eval` maps the name of an evaluation set to its score before and after, by what `run.headline` says. The trainer
    adds the scores of the first set, `score_before`, `score_after` and `score_best`, and `best_step`, after which the
    best was found; `accuracy_before`, `accuracy_after` and `accuracy_best` are the same where the headline is an
    accuracy.
    Raises ValueError when one of SUMMARY_KEYS is missing or a number is not finite.
    """
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise ValueError(f"summary.json: missing {', '.join(missing)}")
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write(paths.summary, text + "\n")


def read_summary(paths: RunPaths) -> dict[str, Any] | None:
    """What summary.json holds; None when the run has not ended."""
    if not paths.summary.is_file():
        return None
    summary: dict[str, Any] = read_json(paths.summary, dict)
    return summary


def _checked(step: int, key: str, value: Value) -> Value:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"metric '{key}' of step {step} is a {type(value).__name__}; log a plain number")
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        raise ValueError(f"metric '{key}' of step {step} is {value!s:.40}; a metric is finite, below 1e19")
    return float(value) if isinstance(value, float) else value  # numpy's float64 is a float too


def _cut_torn_line(path: Path) -> bytes:
    """Cut what follows the last line feed; returns the last whole line, empty when there is none.

    Only the end of the file is read, in blocks that double until both line feeds around that line are in them.
    """
    with path.open("rb+") as file:
        size, block = file.seek(0, os.SEEK_END), 1 << 14
        while True:
            start = max(0, size - block)
            file.seek(start)
            data = file.read(size - start)
            end = data.rfind(b"\n")
            before = data.rfind(b"\n", 0, max(end, 0))
            if start == 0 or (end >= 0 and before >= 0):
                break
            block *= 2
        if start + end + 1 < size:
            file.truncate(start + end + 1)
    return data[before + 1 : end] if end >= 0 else b""
