"""Draws docs/demo.svg, the README's picture, from a demo's run folder: `python docs/make_picture.py runs/demo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mm_grpo.run.metrics import read_rows

SETS = {"colour_and_shape": "held-out questions", "blind": "the same, images shuffled"}
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460, 58, 446, 10, 190
COLOURS = ("#2b66c4", "#c1590c", "#12806a", "#8242a8", "#b3245f", "#6b6f0f")
HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} HEIGHT" role="img" aria-label="LABEL"><style>
svg {{ background: #fff; }} text {{ font: 12px sans-serif; fill: #444; }} .end {{ text-anchor: end; }}
line {{ stroke: #ccc; }} polyline {{ fill: none; stroke-width: 2; }}</style>"""


def line_chart(
    unit: str, lines: Sequence[tuple[str, Sequence[tuple[int, float]]]], limits: tuple[float, float]
) -> str:
    """An SVG file of lines, each a name and (step, value) points; `unit` names the y axis, which has `limits`."""
    steps = [x for _, points in lines for x, _ in points]
    (low, high), first, last = limits, min(steps), max(steps)

    def place(x: float, y: float) -> str:
        across, up = (x - first) / ((last - first) or 1), (y - low) / ((high - low) or 1)
        return f"{LEFT + across * (RIGHT - LEFT):.1f},{BOTTOM - up * (BOTTOM - TOP):.1f}"

    height = str(BOTTOM + 26 + 16 * len(lines))
    parts = [HEAD.replace("HEIGHT", height).replace("LABEL", escape(f"{unit} by step"))]
    for at, value in ((BOTTOM, low), ((TOP + BOTTOM) / 2, (low + high) / 2), (TOP, high)):
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{at:g}" y2="{at:g}"/>')
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{at + 4:g}">{value:.4g}</text>')
    parts.append(f'<text x="{LEFT}" y="{BOTTOM + 16}">step {first:g}</text>')
    parts.append(f'<text class="end" x="{RIGHT}" y="{BOTTOM + 16}">{last:g}</text>')
    for i, (name, points) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline stroke="{colour}" points="{path}"/>')
        spot = f'x="{LEFT}" y="{BOTTOM + 34 + 16 * i}"'
        parts.append(f'<text {spot} style="fill: {colour}">{escape(name)}</text>')
    return "".join(parts) + "</svg>\n"


def picture(folder: Path) -> str:
    """Accuracy with the images and without them over the steps."""
    rows = read_rows(folder / "metrics.jsonl")
    lines = []
    for name, label in SETS.items():
        points = [
            (row["step"], value) for row in rows if (value := row.get(f"eval/{name}/accuracy")) is not None
        ]
        lines.append((f"{label}: {points[0][1]:.2f} → {points[-1][1]:.2f}", points))
    return line_chart("accuracy", lines, limits=(0.0, 1.0))


if __name__ == "__main__":
    (Path(__file__).parent / "demo.svg").write_text(picture(Path(sys.argv[1])), encoding="utf-8")
