"""summary.json: the run in a few numbers, written once at its end.

`eval` maps the name of an evaluation set to its accuracy before and after; `accuracy_before` and
`accuracy_after` are those of the set that stands for the run. The trainer adds `accuracy_best`, the highest of
that set, and `best_step`, after which it was found. Accuracies lie in [0, 1].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from mm_grpo.run.atomic import atomic_write
from mm_grpo.run.paths import RunPaths

KEYS = ("accuracy_before", "accuracy_after", "seconds", "steps", "eval")


def write_summary(paths: RunPaths, summary: Mapping[str, Any]) -> None:
    """Write summary.json: the KEYS, and any further keys of JSON values. None stands for "not measured".

    Raises ValueError, naming the key, when one of KEYS is missing or a number is not finite.
    """
    missing = [key for key in KEYS if key not in summary]
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


def _require_finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"summary.json: '{where}' is {value}; a number is finite, or None")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _require_finite(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _require_finite(inner, f"{where}[{index}]")
