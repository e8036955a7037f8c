"""clicking: points against boxes and polygons, in every space, by hand and against pixels."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_grpo.rewards.builtins.clicking import clicking, is_inside, point_inside
from mm_grpo.types import Sample

SEEN = (Image.new("RGB", (56, 28)),)
ROW = Sample("row:0", [], (Image.new("RGB", (112, 140)),))  # seen at half the width and a fifth of the height
TRIANGLE = [[0, 0], [40, 0], [0, 40]]

whole = st.integers(0, 20)
sides = st.lists(whole, min_size=2, max_size=2, unique=True).map(sorted)
corners = st.tuples(sides, sides).map(lambda s: ((s[0][0], s[1][0]), (s[0][1], s[1][1])))
polygons = st.lists(st.tuples(whole, whole), min_size=3, max_size=7)


def test_the_graded_form_falls_with_the_distance_in_pixels_as_seen() -> None:
    image = (Image.new("RGB", (300, 400)),)  # a diagonal of 500
    options: dict[str, Any] = {"images": image, "gold_space": "pixel", "reach": 0.2}
    box = [100, 100, 200, 200]
    assert clicking("(150, 150)", box, **options) == 1.0
    assert clicking("(250, 150)", box, **options) == pytest.approx(0.5)  # 50 of 100
    assert clicking("(230, 240)", box, **options) == pytest.approx(0.5)  # 30 and 40: 50
    assert clicking("(299, 150)", box, **options) == pytest.approx(0.01)
    assert clicking("(150, 301)", box, **options) == 0.0
    assert clicking("nowhere", box, **options) == 0.0
    # the same point in thousandths, whose x and y are not equally long
    assert clicking("(833.3333333, 375)", box, space="0-1000", **options) == pytest.approx(0.5)
    triangle = [100, 100, 200, 100, 100, 200]
    assert clicking("(200, 200)", triangle, **options) == pytest.approx(1 - math.hypot(50, 50) / 100)


def test_polygons_are_scaled() -> None:
    half = [0, 35, 56, 35, 56, 105, 0, 105]  # the left half of the image, from a quarter of its height on
    scores = [clicking(text, half, SEEN, ROW) for text in ("(14, 20)", "(14, 22)", "(29, 20)")]
    assert scores == [1.0, 0.0, 0.0]


def test_a_target_outside_its_image_and_a_reach_without_one() -> None:
    with pytest.raises(ValueError, match="image, which is 112 × 140 in the space 'original'"):
        clicking("(1, 1)", [0, 0, 200, 0, 0, 200], SEEN, ROW)
    with pytest.raises(ValueError, match="need the image's size"):
        clicking("(1, 1)", TRIANGLE, reach=0.5)


@given(st.lists(st.tuples(whole, whole), min_size=3, max_size=3, unique=True), whole, whole)
def test_a_point_in_a_triangle_has_all_edges_on_one_side(points: Any, x: int, y: int) -> None:
    a, b, c = points
    if (b[0] - a[0]) * (c[1] - a[1]) == (b[1] - a[1]) * (c[0] - a[0]):  # on one line
        c = (a[0] - (b[1] - a[1]), a[1] + (b[0] - a[0]))
    sides = [(q[0] - p[0]) * (y - p[1]) - (q[1] - p[1]) * (x - p[0]) for p, q in ((a, b), (b, c), (c, a))]
    assert is_inside((x, y), (a, b, c)) == (min(sides) >= 0 or max(sides) <= 0)


@given(polygons, corners)
def test_a_point_inside_is_inside(points: Any, spread: Any) -> None:
    polygon = tuple((float(x), float(y)) for x, y in (*points, *spread))
    assert is_inside(point_inside(polygon), polygon)
