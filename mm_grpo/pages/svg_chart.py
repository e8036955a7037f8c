"""Line charts as SVG files, for what runs no script: a model's card and the README. page.js draws a page's own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from mm_grpo.pages.curves import Point, thinned

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460, 58, 446, 10, 190
COLOURS = ("#2b66c4", "#c1590c", "#12806a", "#8242a8", "#b3245f", "#6b6f0f")
HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} HEIGHT" role="img" aria-label="LABEL"><style>
svg {{ background: #fff; }} text {{ font: 12px sans-serif; fill: #444; }} .end {{ text-anchor: end; }}
line {{ stroke: #ccc; }} polyline {{ fill: none; stroke-width: 2; }}</style>"""


def line_chart(
    unit: str, lines: Sequence[tuple[str, Sequence[Point]]], limits: tuple[float, float] | None = None
) -> str:
    """An SVG file of lines, each a name and (step, value) points, of which None breaks the line.

    `unit` names the y axis. It goes from and to `limits`, or from the lowest to the highest value.
    """
    known = [(x, y) for _, points in lines for x, y in points if y is not None]
    if not known:
        raise ValueError(f"chart '{unit}' has no values")
    low, high = limits or (min(y for _, y in known), max(y for _, y in known))
    first, last = min(x for x, _ in known), max(x for x, _ in known)

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
        for known_here, stretch in groupby(thinned(points)["points"], key=lambda point: point[1] is not None):
            if known_here:
                path = " ".join(place(x, y) for x, y in stretch if y is not None)
                parts.append(f'<polyline stroke="{colour}" points="{path}"/>')
        spot = f'x="{LEFT}" y="{BOTTOM + 34 + 16 * i}"'
        parts.append(f'<text {spot} style="fill: {colour}">{escape(name)}</text>')
    return "".join(parts) + "</svg>\n"
