"""Draws docs/demo.svg, the README's picture, from a demo's run folder: `python docs/make_picture.py runs/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from mm_grpo.pages.svg_chart import line_chart
from mm_grpo.run.metrics import read_metrics

SETS = {"colour_and_shape": "held-out questions", "blind": "the same, images shuffled"}


def picture(folder: Path) -> str:
    """Accuracy with the images and without them over the steps."""
    rows = read_metrics(folder / "metrics.jsonl")
    lines = []
    for name, label in SETS.items():
        points = [
            (row["step"], value) for row in rows if (value := row.get(f"eval/{name}/accuracy")) is not None
        ]
        lines.append((f"{label}: {points[0][1]:.2f} → {points[-1][1]:.2f}", points))
    return line_chart("accuracy", lines, limits=(0.0, 1.0))


if __name__ == "__main__":
    (Path(__file__).parent / "demo.svg").write_text(picture(Path(sys.argv[1])), encoding="utf-8")
