"""The names of docs/metrics.md; parts that a run chooses are `{}`."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
OWN = "{logged}"
"""What a reward logs has any name it likes."""


def metrics_of_the_page() -> set[str]:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    return {re.sub(r"\{\w+\}", "{}", name) for name in names - {OWN}}


def not_on_the_page(names: set[str]) -> list[str]:
    """Those of the names of a run's metrics that fit no name of the page."""
    known = [re.escape(name).replace(r"\{\}", r"[^/]+") for name in metrics_of_the_page() | {"step"}]
    return sorted(name for name in names if not any(re.fullmatch(one, name) for one in known))
