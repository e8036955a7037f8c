"""The numbers of a run: metrics.jsonl, one JSON object a step under TRL's metric names, and summary.json at its end.

A row is complete or absent: the last line that a killed process left unfinished is cut when the log
is opened again, and passed over by the reader. A value that was not measured is None, and never
NaN, which JSON cannot hold and curves silently drop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from mm_grpo.errors import DataError
from mm_grpo.files import atomic_write
from mm_grpo.run.paths import RunPaths

Value = float | int | str | bool | None
SUMMARY_KEYS = ("accuracy_before", "accuracy_after", "seconds", "steps", "eval")


class MetricsLog:
    """Appends to a metrics.jsonl; steps only go up."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.last_step = -1
        if self.path.exists():
            _cut_torn_line(self.path)
            rows = read_metrics(self.path)
            self.last_step = rows[-1]["step"] if rows else -1

    def append(self, step: int, values: Mapping[str, Value]) -> None:
        """Write one row, in the order given, and hand it to the operating system at once.

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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.last_step = step


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; an unfinished last line is left out.

    Raises DataError, naming the line, when any other line is no object with a step.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); remove the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{path}, line {number}: a row is an object with a whole number 'step'")
        rows.append(row)
    return rows


def write_summary(paths: RunPaths, summary: Mapping[str, Any]) -> None:
    """Write summary.json: the SUMMARY_KEYS, and any further keys of JSON values. None stands for "not measured".

    `eval` maps the name of an evaluation set to its score before and after, by what `run.headline` says. The trainer
    adds the scores of the first set, `score_before`, `score_after` and `score_best`, and `best_step`, after which the
    best was found; `accuracy_before`, `accuracy_after` and `accuracy_best` are the same where the headline is an
    accuracy.
    Raises ValueError, naming the key, when one of SUMMARY_KEYS is missing or a number is not finite.
    """
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise ValueError(f"summary.json: missing {', '.join(missing)}")
    _require_finite(summary, "")
    atomic_write(paths.summary, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def read_summary(paths: RunPaths) -> dict[str, Any] | None:
    """What summary.json holds; None when the run has not ended."""
    if not paths.summary.is_file():
        return None
    summary: dict[str, Any] = json.loads(paths.summary.read_text(encoding="utf-8"))
    return summary


def _checked(step: int, key: str, value: Value) -> Value:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"metric '{key}' of step {step} is a {type(value).__name__}; log a plain number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"metric '{key}' of step {step} is {value}; a metric is finite, or None")
    return float(value) if isinstance(value, float) else value  # numpy's float64 is a float too


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def _require_finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"summary.json: '{where}' is {value}; a number is finite, or None")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _require_finite(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _require_finite(inner, f"{where}[{index}]")
