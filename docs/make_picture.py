"""Draws docs/demo.svg, the README's picture, from a demo's run folder: `python docs/make_picture.py runs/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from mm_grpo.run.charts import Series, line_chart, number
from mm_grpo.run.metrics import read_metrics

STYLE = """<style>
svg { background: #fff; } text { font: 12px sans-serif; fill: #444; } .end { text-anchor: end; }
.mid { text-anchor: middle; } .grid { stroke: #e6e6e6; } .axis { stroke: #999; } .hidden { opacity: 0; }
.line { fill: none; stroke-width: 2; } .line.s1 { stroke: #1f6fb2; } .line.s2 { stroke: #c2571a; }
.dot.s1 { fill: #1f6fb2; } .dot.s2 { fill: #c2571a; }
</style>"""
SETS = {"colour_and_shape": "held-out questions", "blind": "the same, images shuffled"}


def picture(folder: Path) -> str:
    """Accuracy with the images and without them over the steps, as one SVG that needs no page around it."""
    rows = read_metrics(folder / "metrics.jsonl")
    lines, legend = [], []
    for slot, (name, label) in enumerate(SETS.items(), start=1):
        key = f"eval/{name}/accuracy"
        points = [(r["step"], r[key]) for r in rows if key in r]
        lines.append(Series(label, tuple(points), slot=slot))
        colour = ("#1f6fb2", "#c2571a")[slot - 1]
        words = f"{label}: {number(round(points[0][1], 2))} → {number(round(points[-1][1], 2))}"
        legend.append(f'<text x="200" y="{44 + 18 * slot}" style="fill:{colour}">{words}</text>')
    chart = line_chart("accuracy", "accuracy", lines, limits=(0.0, 1.0))
    chart = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="690" ', 1)
    head, _, rest = chart.partition(">")
    return f"{head}>{STYLE}{rest.removesuffix('</svg>')}{''.join(legend)}</svg>\n"


if __name__ == "__main__":
    (Path(__file__).parent / "demo.svg").write_text(picture(Path(sys.argv[1])), encoding="utf-8")
