"""Line charts as inline SVG: axes, ticks, labels, and a tooltip on each point of a short line; no library.

Colours come from the page (the classes of `Series.look` and of the axes in report.css), so that one chart
fits a light and a dark page. Values that are None break the line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40
MOST_POINTS = 640
MOST_DOTS = 60
LOOKS = 6
"""Colours; lines after as many are dashed."""

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line: its name, and (step, value) points in the order of the steps.

    `slot` counts from 1: LOOKS colours, then the same ones dashed. What was `expected` is grey.
    """

    label: str
    points: tuple[Point, ...]
    slot: int = 1
    faint: bool = False
    expected: bool = False

    @property
    def look(self) -> str:
        """The classes that the page gives a colour and a stroke."""
        if self.expected:
            return "expected"
        dashed = " dashed" if (self.slot - 1) % (2 * LOOKS) >= LOOKS else ""
        return f"s{(self.slot - 1) % LOOKS + 1}{dashed}{' faint' if self.faint else ''}"


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    limits: tuple[float, float | None] | None = None,
    events: Sequence[tuple[float, str]] = (),
) -> str:
    """An <svg> of the series over the steps.

    `unit` names the y axis, which has no name where it is empty. `limits` fix the ends of the y axis, where None is as
    high as the values; without, the values do. `events` are
    (step, words), each a line across. `data-x` holds the steps at the left and the right end of the plot.
    """
    known = [(x, y) for line in series for x, y in line.points if y is not None]
    if not known:
        raise ValueError(f"chart '{title}' has no values")
    low, high = _ends(min(y for _, y in known), max(y for _, y in known), limits)
    x_ticks = nice_ticks(min(x for x, _ in known), max(x for x, _ in known), 6, whole=True)
    y_ticks = nice_ticks(low, high, 5)
    x_low, x_high = min(x for x, _ in known), max(x for x, _ in known)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    first, last = known[0][1], known[-1][1]
    described = escape(f"{title} by step, from {number(first)} to {number(last)}", quote=True)
    ends = f'data-x="{x_low} {x_high}" data-y="{low} {high}"'
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{described}" {ends}>']
    for tick in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>'
        )
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{py(tick) + 3.5:.1f}">{number(tick)}</text>')
    floor = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            parts.append(f'<text class="tick mid" x="{px(tick):.1f}" y="{floor + 16}">{number(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label mid" x="{middle:.1f}" y="{HEIGHT - 6}">step</text>')
    if unit:
        up = (TOP + floor) / 2
        parts.append(
            f'<text class="label mid" transform="translate(13 {up:.1f}) rotate(-90)">{escape(unit)}</text>'
        )
    for x, words in events:
        if x_low <= x <= x_high:
            at = f'x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{TOP}" y2="{floor}"'
            parts.append(f'<line class="event" {at}><title>{escape(words)}</title></line>')
    for line in sorted(series, key=lambda line: not line.expected):  # what was expected lies under the others
        points = thin(line.points)
        for run in _unbroken(points):
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in run)
            parts.append(f'<polyline class="line {line.look}" points="{path}"/>')
        for x, y in points if len(points) <= MOST_DOTS and not line.faint else ():
            if y is not None:
                tip = escape(f"{line.label}, step {number(x)}: {number(y)}")
                at = f'cx="{px(x):.1f}" cy="{py(y):.1f}"'
                parts.append(f'<circle class="dot {line.look}" {at} r="3"><title>{tip}</title></circle>')
    return "".join(parts) + "</svg>"


def nice_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, from at or below `low` to at or above `high`.

    There are at most `count` + 2 of them; `whole` keeps them integers.

    >>> nice_ticks(0.03, 0.91, 4)
    [0.0, 0.5, 1.0]
    """
    if low == high:
        high = low + 1
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if rough <= m * power * (1 + 1e-9))
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def running_mean(points: Sequence[Point], width: int) -> tuple[Point, ...]:
    """The centred mean over `width` (odd) points; shorter at the ends, so that no point is lost."""
    half = width // 2
    means: list[Point] = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1] if y is not None]
        means.append((x, math.fsum(near) / len(near) if near else None))
    return tuple(means)


def thin(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS of the points: the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) * 2 / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        known = [(x, y) for x, y in points[start : start + size] if y is not None]
        if known:
            ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])}
            kept += sorted(ends)
    return kept


def number(value: float) -> str:
    """A number as short as it can be read: 0.412, 12, 3.1e-05, 12.5k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value / 1e3:.4g}k"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def _ends(low: float, high: float, limits: tuple[float, float | None] | None) -> tuple[float, float]:
    """The ends of the y axis for values from `low` to `high`: never equal, and with all values between."""
    if limits is not None:
        low, high = min(low, limits[0]), max(high, high if limits[1] is None else limits[1])
        return low, high if high > low else low + 1
    if low == high:
        pad = abs(low) * 0.1 or 0.5
        return low - pad, high + pad
    return (0.0, high) if 0 <= low <= (high - low) * 2 else (low, high)


def _unbroken(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The stretches of points without a None between them."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if len(run) > 1]
