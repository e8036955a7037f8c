"""Mark of a warmed model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_mark(folder: Path, config: Any, *, base: str, answer: str, steps: int, nll: float) -> None:
    """Write the mark."""
    values = {"base": base, "answer": answer, "steps": steps, "nll": nll}
    (folder / "mm_grpo_warm.json").write_text(json.dumps(values))
