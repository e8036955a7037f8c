"""Results of several sittings: the file keeps each of them, and its rows hold medians and ranges over all.

Times differ from one process to the next, by what the allocator does with large blocks, and from one day to the next.
A ratio of one sitting says little of the next one's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import rounded

Sitting = Mapping[str, Any]
"""{"rows": [...]}, and what else sets it apart."""


def former(path: Path, versions: Mapping[str, Any]) -> list[Sitting]:
    """The sittings that a file has, if they are of these versions."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    sittings: list[Sitting] = found.get("sittings", [])
    return sittings if found["versions"] == versions else []


def add(
    path: Path | None,
    versions: Mapping[str, Any],
    sitting: Sitting,
    summary: Callable[[Sequence[Sitting]], list[dict[str, Any]]],
) -> None:
    """Write a sitting behind those of equal versions that the file has, and the summary of all as its rows."""
    if path is None:
        return
    this = {**sitting, "rows": [rounded(row) for row in sitting["rows"]]}
    sittings = [*former(path, versions), this]
    rows = [rounded(row) for row in summary(sittings)]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"versions": dict(versions), "rows": rows, "sittings": sittings}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def ranged(key: str, values: Sequence[float]) -> dict[str, float]:
    """The median of some values under `key`, the least and the most of them under `key_low` and `key_high`."""
    return {key: statistics.median(values), f"{key}_low": min(values), f"{key}_high": max(values)}


def by_workload(sittings: Sequence[Sitting]) -> list[dict[str, Any]]:
    """A row for each workload: medians of its numbers, with ranges of its ratios; `sittings` counts them."""
    of: dict[str, list[Mapping[str, Any]]] = {}
    for sitting in sittings:
        for row in sitting["rows"]:
            of.setdefault(row["workload"], []).append(row)
    rows = []
    for each in of.values():
        summary: dict[str, Any] = {"sittings": len(each)}
        for key, last in each[-1].items():
            values = [one[key] for one in each]
            if key.endswith("ratio"):
                summary |= ranged(key, values)
            else:
                summary[key] = statistics.median(values) if isinstance(last, float) else last
        rows.append(summary)
    return rows
