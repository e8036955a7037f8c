import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_grpo.rewards.builtins.mask_iou import mask_iou
from mm_grpo.rewards.builtins.masks import Rle, mask_in, read_mask, render
from mm_grpo.types import Sample

UNIT = {"space": "normalized", "gold_space": "normalized"}
LEFT = {"size": [4, 4], "counts": [0, 8, 8]}  # the two columns at the left of a 4 × 4 image
SQUARE = [0, 0, 1, 0, 1, 1, 0, 1]


def encode(mask: np.ndarray) -> list[int]:
    """Runs column by column, the first one of zeros."""
    runs, value = [0], False
    for cell in mask.T.reshape(-1):
        if bool(cell) != value:
            runs.append(0)
            value = bool(cell)
        runs[-1] += 1
    return runs


def compress(runs: list[int]) -> str:
    """Six bits a character: five of the number from the lowest up, and one that says more follow."""
    text = ""
    for i, run in enumerate(runs):
        rest = run - runs[i - 2] if i > 2 else run
        while True:
            five, rest = rest & 31, rest >> 5
            done = rest == (-1 if five & 16 else 0)
            text += chr(48 + (five if done else five | 32))
            if done:
                break
    return text


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_rles_of_both_forms_are_read(height, width, data):
    cells = data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    mask = np.array(cells).reshape(height, width)
    runs = encode(mask)
    for counts in (runs, compress(runs), compress(runs).encode()):
        shape = read_mask({"size": [height, width], "counts": counts})
        assert shape == Rle(height, width, tuple(runs))
        assert (render(shape, (1, 1), (height, width)) == mask).all()


def test_a_compressed_rle_with_long_runs():
    runs = [100_000, 5, 3, 99_992]
    assert read_mask({"size": [400, 500], "counts": compress(runs)}) == Rle(400, 500, tuple(runs))
    assert (
        compress([6, 1, 40, 4, 5, 4, 5, 4, 21]) == "61X13mN000`0"
    )  # the example in COCO's own documentation


@pytest.mark.parametrize(
    "bad",
    [
        None, 3, "", "here", [], {}, [1, 2, 3], [1, 2], [[1, 2]], ["a", "b", "c", "d"], [1, 2, float("nan"), 4, 5, 6],
        [5, 5, 1, 1], [1e9, 0, 1, 1, 0, 1], [0, 0] * 2001, {"size": [4, 4]}, {"size": [4, 4], "counts": [16, 1]},
        {"size": [4, 4], "counts": [-1, 17]}, {"size": [0, 4], "counts": []}, {"size": "44", "counts": [16]},
        {"size": [4, 4], "counts": "\u00e9"}, {"size": [4, 4], "counts": "o" * 50}, {"size": [4, 4], "counts": [16.0]},
        {"size": [99999, 99999], "counts": [99999**2]}, {"mask": None}, {"mask": {"mask": "x"}},
    ],
)  # fmt: skip
def test_what_is_no_mask(bad):
    assert read_mask(bad) is None


def test_masks_in_a_text():
    assert mask_in("so " + json.dumps(LEFT)) == Rle(4, 4, (0, 8, 8))
    assert mask_in('<answer>{"polygon": [[0, 0], [1, 0], [1, 1]]}</answer>') == (((0, 0), (1, 0), (1, 1)),)
    assert mask_in("[0, 0, 1, 1] no, [0, 0, 2, 2]") == (((0, 0), (2, 0), (2, 2), (0, 2)),)
    assert mask_in("[0, 0, 1, 1] [cut off") == (((0, 0), (1, 0), (1, 1), (0, 1)),)
    assert mask_in("[[0, 0, 1, 1], [2, 2, 3, 3]]") is not None
    assert mask_in("no mask") is None and mask_in("[" * 100_000) is None


def test_polygons_are_drawn_by_the_centres_of_cells():
    triangle = read_mask([0, 0, 4, 0, 0, 4])
    assert triangle is not None
    assert render(triangle, (4, 4), (4, 4)).astype(int).tolist() == [
        [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]  # fmt: skip


@given(st.lists(st.tuples(st.integers(-8, 24), st.integers(-8, 24)), min_size=3, max_size=7))
def test_a_polygon_is_filled_as_the_crossing_rule_says(points):
    shape = read_mask([list(point) for point in points])
    assert shape is not None
    drawn = render(shape, (16, 16), (16, 16))
    for y in range(16):
        for x in range(16):
            cx, cy, inside = x + 0.5, y + 0.5, False
            for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
                if (y0 > cy) != (y1 > cy):
                    crossing = x0 + (cy - y0) * (x1 - x0) / (y1 - y0)
                    if abs(crossing - cx) < 1e-9:
                        break  # on the edge: either is right
                    inside ^= crossing < cx
            else:
                assert drawn[y, x] == inside


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("[0, 0, 1, 1]", 1.0),
        ("[0, 0, 0.5, 1]", 0.5),
        ("[[0, 0], [1, 0], [1, 1], [0, 1]]", 1.0),
        ("[[0, 0, 0.5, 1], [0.5, 0, 1, 1]]", 1.0),
        ("[[0, 0, 0.5, 1], [0, 0, 0.5, 1]]", 0.5),
        ("[-5, -5, 5, 5]", 1.0),
        ("[2, 2, 3, 3]", 0.0),
        (json.dumps(LEFT), 0.5),
        (json.dumps({"mask": LEFT}), 0.5),
        ("nothing", 0.0),
        ("", 0.0),
        ("[NaN, 0, 1, 1]", 0.0),
    ],
)
def test_mask_iou_against_a_polygon(completion, score):
    assert mask_iou(completion, SQUARE, **UNIT) == score


def test_mask_iou_against_an_rle():
    assert mask_iou("[0, 0, 0.5, 1]", LEFT, space="normalized") == 1.0
    assert mask_iou("[0, 0, 500, 500]", json.dumps(LEFT), space="0-1000") == 0.5
    assert mask_iou("[0, 0, 2, 4]", LEFT) == 1.0  # without an image its size is that of the RLE
    assert mask_iou(json.dumps({"size": [2, 2], "counts": [0, 2, 2]}), LEFT) == 1.0  # another size


def test_mask_iou_in_pixels_of_two_sizes():
    seen, row = (Image.new("RGB", (28, 28)),), Sample("row:0", [], (Image.new("RGB", (56, 112)),))
    gold = [[0, 0], [28, 0], [28, 112], [0, 112]]  # the left half, in the original
    assert mask_iou("[0, 0, 14, 28]", gold, seen, row) == 1.0
    assert mask_iou("[0, 0, 28, 28]", gold, seen, row) == 0.5
    assert mask_iou("[0, 0, 14, 28]", [0, 0, 14, 28], seen, row, gold_space="pixel") == 1.0


@given(st.data())
def test_mask_iou_is_symmetric_and_in_its_range(data):
    boxes = [
        data.draw(st.tuples(*[st.integers(0, 16)] * 4).filter(lambda b: b[0] < b[2] and b[1] < b[3]))
        for _ in "ab"
    ]
    one, other = ([n / 16 for n in box] for box in boxes)
    value = mask_iou(json.dumps(one), other, **UNIT, resolution=16)
    assert 0 <= value <= 1 and value == mask_iou(json.dumps(other), one, **UNIT, resolution=16)
    cells = [{(x, y) for x in range(b[0], b[2]) for y in range(b[1], b[3])} for b in boxes]
    assert value == len(cells[0] & cells[1]) / len(cells[0] | cells[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": "here"}, "the gold mask is here; it must be an RLE with size and counts, or polygons"),
        (
            {"mask": {"size": [2, 2], "counts": [4]}},
            "the gold mask is empty on its grid; see the options gold_space",
        ),
        ({"mask": [5, 5, 6, 6], "gold_space": "normalized"}, "the gold mask is empty on its grid"),
        ({"mask": SQUARE}, "coordinates in the space 'original' need the image's size"),
        ({"mask": SQUARE, "resolution": 0}, "resolution=0; it is a number of cells"),
    ],
)
def test_golds_that_cannot_be_used(arguments, message):
    with pytest.raises(ValueError, match=message):
        mask_iou("[0, 0, 1, 1]", **arguments)
