"""Boxes and points in a text, coordinate spaces; iou, giou and box_match."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from mm_grpo.rewards import Scorer
from mm_grpo.rewards.builtins.boxes import Frame, boxes_in, iou_of, point_in
from mm_grpo.rewards.builtins.clicking import clicking
from mm_grpo.rewards.builtins.grounding import box_match, giou, iou, max_pairs
from mm_grpo.types import Sample

SEEN = (Image.new("RGB", (56, 28)),)
ROW = Sample("row:0", [], (Image.new("RGB", (112, 140)),))  # seen at half the width and a fifth of the height


def with_area(numbers):
    """Boxes whose sides are not 0, with corners of these numbers."""
    sides = st.lists(numbers, min_size=2, max_size=2, unique=True).map(sorted)
    return st.tuples(sides, sides).map(lambda s: (s[0][0], s[1][0], s[0][1], s[1][1]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("1, 2, 3, 4.", [(1, 2, 3, 4)]),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", [(1, 2, 3, 4)]),
        ("[[1, 2], [3, 4]]", [(1, 2, 3, 4)]),
        ("<answer>[1, 2, 3, 4]</answer> [5, 6, 7, 8]", [(1, 2, 3, 4)]),
        ("[0.25, .5, 0.75, 1.]", [(0.25, 0.5, 0.75, 1)]),
        ("[1, 2, 3, 4, 5]", []),
        ("[1, 2, 3, 1e8]", []),
    ],
)
def test_boxes_in_a_text(text, found):
    assert boxes_in(text) == found


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("", None),
        ("[3.5, 4]", (3.5, 4)),
        ('<point x="3" y="4" alt="a">a</point>', (3, 4)),
        ('{"point_2d": [3, 4], "label": "a"}', (3, 4)),
        ("(1, 2) no, (3, 4)", (3, 4)),
        ("(1, 2), (3, 4)", (2, 3)),
        ("[1, 2, 3, 4] so (9, 9)", (9, 9)),
        ("(3, 1e99)", None),
    ],
)
def test_the_point_in_a_text(text, point):
    assert point_in(text) == point


@given(with_area(st.integers(0, 30)), with_area(st.integers(0, 30)))
def test_iou_counts_the_pixels_of_whole_boxes(one, other):
    cells = [set(itertools.product(range(b[0], b[2]), range(b[1], b[3]))) for b in (one, other)]
    assert iou_of(one, other) == len(cells[0] & cells[1]) / len(cells[0] | cells[1])
    assert iou(f"{list(one)}", other) == iou_of(one, other)


@pytest.mark.field_bug("box-space")
def test_every_pair_of_spaces_agrees():
    # one box: the left half of the image, from a quarter of its height to three quarters
    written = {
        "pixel": "[0, 7, 28, 21]",
        "normalized": "[0, 0.25, 0.5, 0.75]",
        "0-1000": "[0, 250, 500, 750]",
    }
    gold = {
        "pixel": (0, 7, 28, 21),
        "original": (0, 35, 56, 105),
        "normalized": (0, 0.25, 0.5, 0.75),
        "0-1000": (0, 250, 500, 750),
    }
    for space, text in written.items():
        for gold_space, box in gold.items():
            options = {"space": space, "gold_space": gold_space}
            assert iou(text, box, SEEN, ROW, **options) == pytest.approx(1.0)
            assert giou(text, box, SEEN, ROW, **options) == pytest.approx(1.0)
            assert box_match(text, [box], SEEN, ROW, **options, threshold=1.0) == 1.0
            assert clicking(text, box, SEEN, ROW, **options) == 1.0


@pytest.mark.field_bug("box-space")
def test_gold_boxes_live_in_the_original_image_by_default(rows):
    prompts, completions = rows(["[0, 0, 2, 2]", "[0, 0, 4, 4]"], box=[[0, 0, 4, 4], [0, 0, 5, 4]])
    # the images are 4 × 4 and 5 × 4 pixels, and the model saw 2 × 2
    assert Scorer(["iou"]).score(prompts, completions, step=1).parts == {"iou": [1.0, 0.25]}
    seen = Scorer([{"name": "iou", "gold_space": "pixel"}])
    with pytest.raises(Exception, match="does not lie in its image, which is 2 × 2 in the space 'pixel'"):
        seen.score(prompts, completions, step=1)


def test_the_image_of_several_or_none():
    images = (Image.new("RGB", (10, 10)), Image.new("RGB", (20, 20)))
    second = {"space": "normalized", "gold_space": "pixel", "image_index": 1}
    assert iou("[0, 0, 1, 1]", (0, 0, 20, 20), images, **second) == 1.0
    assert iou("[0, 0, 1, 1]", (0, 0, 1, 1), gold_space="original") == 1.0
    assert Frame().scale("normalized", "0-1000") == (1000.0, 1000.0)
    for box, images_of, options, message in (
        ((0, 0, 1, 1), (images,), {"image_index": 2}, r"image_index=2, and the row has 2 image"),
        ((0, 0, 200, 100), (SEEN, ROW), {}, "image, which is 112 × 140 in the space 'original'"),
        ((0, 0, 1, 1), (), {"gold_space": "normalized"}, "the space 'pixel' need the image's size"),
    ):
        with pytest.raises(ValueError, match=message):
            iou("[0, 0, 1, 1]", box, *images_of, **options)


@example([[False, True], [True, True], [False, True]])
@given(
    st.integers(1, 5).flatmap(
        lambda m: st.lists(st.lists(st.booleans(), min_size=m, max_size=m), min_size=1, max_size=5)
    )
)
def test_no_other_pairs_are_more(hits):
    n, m = len(hits), len(hits[0])
    small, large = min(n, m), max(n, m)
    best = max(
        sum(hits[i][j] if n <= m else hits[j][i] for i, j in zip(range(small), chosen, strict=True))
        for chosen in itertools.permutations(range(large), small)
    )
    assert max_pairs(hits) == best
