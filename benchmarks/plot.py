"""Draws the learner's results: how much faster than TRL each shape is, and how much the bound would allow.

    python benchmarks/plot.py [results/cpu/learner.json] [learner.svg]

One bar per shape, TRL's seconds over ours; the mark on it is TRL's seconds over the bound of `learner.py`, where a
learner would be that spends time on matrix products alone. The line at 1 is TRL. Colours follow the reader's
scheme, light or dark.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "cpu"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP, BOTTOM = 720, 210, 120, 34, 20, 14, 44
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.grid { stroke: #d1d9e0 }
.one { stroke: #59636e }
.bar { fill: #2a78d6 }
.mark { stroke: #b3261e; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.small { fill: #9198a1 }
.grid { stroke: #3d444d }
.one { stroke: #9198a1 }
.bar { fill: #4c93e8 }
.mark { stroke: #ff8a80 }
}
"""


def drawn(rows: Sequence[Mapping[str, Any]]) -> str:
    """The chart as a whole SVG document."""
    found = [
        (
            f"{r['shape']}: G = {r['G']}, T = {r['T']}, L = {r['L']}",
            r["seconds_trl"] / r["seconds_ours"],
            r["seconds_trl"] / r["seconds_bound"],
        )
        for r in rows
    ]
    most = max(max(ratio, limit) for _, ratio, limit in found)
    every = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if most / step <= 8)
    ticks = [i * every for i in range(math.ceil(most / every) + 1)]
    floor = TOP + len(found) * (BAR + GAP)

    def px(x: float) -> float:
        return LEFT + x / ticks[-1] * (WIDTH - LEFT - RIGHT)

    height = floor + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Speed of the learner against TRL, by shape">',
        f"<style>{STYLE}</style>",
        f'<text class="small" x="{LEFT}" y="18">bar: TRL / ours, of (red mark) TRL / bound</text>',
    ]
    for tick in ticks:
        look = "one" if tick == 1 else "grid"
        parts.append(
            f'<line class="{look}" x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{TOP - 6}" y2="{floor}"/>'
        )
        parts.append(
            f'<text class="small" x="{px(tick):.1f}" y="{floor + 16}" text-anchor="middle">{tick:g}</text>'
        )
    if 1 not in ticks:
        parts.append(f'<line class="one" x1="{px(1):.1f}" x2="{px(1):.1f}" y1="{TOP - 6}" y2="{floor}"/>')
    for i, (label, ratio, limit) in enumerate(found):
        y = TOP + i * (BAR + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{y + BAR - 5}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect class="bar" x="{LEFT}" y="{y}" width="{px(ratio) - LEFT:.1f}" height="{BAR}">'
            f"<title>{escape(label)}: {ratio:.2f} times as fast as TRL, {limit:.2f} at the bound</title></rect>"
        )
        parts.append(
            f'<line class="mark" x1="{px(limit):.1f}" x2="{px(limit):.1f}" y1="{y - 3}" y2="{y + BAR + 3}"/>'
        )
        parts.append(
            f'<text x="{WIDTH - 8}" y="{y + BAR - 5}" text-anchor="end">{ratio:.2f} of {limit:.2f}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="small" x="{middle:.1f}" y="{floor + 36}" text-anchor="middle">'
        "speed of loss and backward, TRL = 1</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    source = Path(given[0]) if given else RESULTS / "learner.json"
    target = Path(given[1]) if len(given) > 1 else source.with_suffix(".svg")
    if not source.is_file():
        print(f"{source}: there is no such file; learner.py --json FILE writes one", file=sys.stderr)
        sys.exit(2)
    target.write_text(drawn(json.loads(source.read_text(encoding="utf-8"))["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
