"""The curves of the report: ticks, means, thinning, and where a value lands in the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from mm_grpo.run.charts import (
    MOST_DOTS,
    MOST_POINTS,
    Series,
    line_chart,
    nice_ticks,
    number,
    running_mean,
    thin,
)


@pytest.mark.parametrize(
    ("low", "high", "count", "whole", "ticks"),
    [
        (0.0, 1.0, 5, False, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.03, 0.91, 4, False, [0.0, 0.5, 1.0]),
        (-0.3, 0.3, 4, False, [-0.4, -0.2, 0.0, 0.2, 0.4]),
        (1, 60, 6, True, [0, 10, 20, 30, 40, 50, 60]),
        (1, 3, 6, True, [1, 2, 3]),
        (7, 7, 4, True, [7, 8]),
        (0, 1.7e-5, 4, False, [0, 5e-6, 1e-5, 1.5e-5, 2e-5]),
    ],
)
def test_ticks_are_round(low: float, high: float, count: int, whole: bool, ticks: list[float]) -> None:
    assert nice_ticks(low, high, count, whole) == pytest.approx(ticks, abs=1e-12)


def test_the_running_mean_is_centred_and_loses_no_point() -> None:
    points = [(1, 1.0), (2, 3.0), (3, None), (4, 5.0)]
    assert running_mean(points, 3) == ((1, 2.0), (2, 2.0), (3, 4.0), (4, 5.0))
    assert running_mean([(1, None)], 3) == ((1, None),)


def test_thinning_keeps_the_spikes() -> None:
    points = [(i, 0.0) for i in range(10_000)]
    points[3333], points[6666] = (3333, 9.0), (6666, -9.0)
    kept = thin(points)
    assert len(kept) <= MOST_POINTS
    assert (3333, 9.0) in kept and (6666, -9.0) in kept
    assert kept == sorted(kept)
    assert thin(points[:5]) == points[:5]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.41249, "0.4125"),
        (12, "12"),
        (-0.5, "-0.5"),
        (3.14e-5, "3.1e-05"),
        (12_500, "12.5k"),
        (2_500_000, "2.5M"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_values_land_where_the_axes_say() -> None:
    # The plot runs from x = 58 to 446 and from y = 190 (low) to 10 (high) in a picture of 460 × 230.
    svg = line_chart("Reward", "mean", [Series("r", ((0, 0.0), (5, 0.5), (10, 1.0)))], limits=(0, 1))
    root = ET.fromstring(svg)
    (line,) = root.iter("polyline")
    assert line.get("points") == "58.0,190.0 252.0,100.0 446.0,10.0"
    assert line.get("class") == "line s1"
    ticks = [t.text for t in root.iter("text")]
    assert ticks == [
        *["0", "0.2", "0.4", "0.6", "0.8", "1"],
        *["0", "2", "4", "6", "8", "10"],
        "step",
        "mean",
    ]
    assert [t.text for t in root.iter("title")] == ["r, step 0: 0", "r, step 5: 0.5", "r, step 10: 1"]


def test_a_missing_value_breaks_the_line() -> None:
    points = ((1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, 4.0))
    root = ET.fromstring(line_chart("t", "u", [Series("r", points)]))
    assert [len((p.get("points") or "").split()) for p in root.iter("polyline")] == [2, 2]
    assert len(list(root.iter("circle"))) == 4


def test_a_single_or_a_constant_value_is_drawn() -> None:
    for points in (((3, 0.0),), ((3, 0.7),), ((1, -2.0), (2, -2.0))):
        for limits in (None, (0, 1), (0, None)):
            svg = line_chart("t", "u", [Series("r", points)], limits)  # type: ignore[arg-type]
            spots = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
            assert len(spots) == len(points) and all(10 <= y <= 190 for y in spots)


def test_an_axis_with_an_open_end_reaches_the_highest_value() -> None:
    svg = line_chart("t", "u", [Series("r", ((1, 1.8), (2, 1.9)))], limits=(0, None))
    assert '<text class="tick end" x="50" y="193.5">0</text>' in svg
    assert svg.count("tick end") == 5  # 0, 0.5, 1, 1.5, 2


def test_the_seventh_line_is_dashed() -> None:
    assert [Series("a", (), slot).look for slot in (1, 6, 7, 12, 13)] == [
        "s1",
        "s6",
        "s1 dashed",
        "s6 dashed",
        "s1",
    ]


def test_events_are_lines_at_their_steps() -> None:
    series = [Series("r", ((0, 0.0), (10, 1.0)))]
    svg = line_chart("r", "", series, (0, 1), [(5, 'guard "x": <b>'), (11, "later")])
    (event,) = [line for line in ET.fromstring(svg).iter("line") if line.get("class") == "event"]
    assert (event.get("x1"), event.get("x2"), event.findtext("title")) == ("252.0", "252.0", 'guard "x": <b>')
    assert 'data-x="0 10"' in svg and [t.text for t in ET.fromstring(svg).iter("text")][-1] == "step"


def test_a_long_line_has_no_dots() -> None:
    points = tuple((i, float(i % 7)) for i in range(MOST_DOTS + 1))
    assert line_chart("r", "", [Series("r", points[:-1])]).count("<circle") == MOST_DOTS
    assert line_chart("r", "", [Series("r", points)]).count("<circle") == 0


def test_labels_are_escaped() -> None:
    svg = line_chart('<b>"t"', "<u>", [Series("<script>", ((1, 1.0),))])
    assert "<script>" not in svg and "<b>" not in svg and "<u>" not in svg
    ET.fromstring(svg)


def test_no_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="chart 'KL' has no values"):
        line_chart("KL", "nats", [Series("kl", ((1, None),))])
