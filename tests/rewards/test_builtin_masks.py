"""mask_iou: RLEs and polygons, read, drawn by pycocotools and compared."""

import json
import time

import numpy as np
import pycocotools.mask as coco
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_grpo.rewards.builtins.masks import Rle, drawn, mask_in, mask_iou, read_mask
from mm_grpo.types import Sample

# pycocotools 2.0.11 knows no numpy 2 in its decode, which only tests call
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

UNIT = {"space": "normalized", "gold_space": "normalized"}
LEFT = {"size": [4, 4], "counts": [0, 8, 8]}  # the two columns at the left of a 4 × 4 image
SQUARE = [0, 0, 1, 0, 1, 1, 0, 1]


def runs_of(mask: np.ndarray) -> list[int]:
    """Runs column by column, the first one of zeros."""
    runs, value = [0], False
    for cell in mask.T.reshape(-1):
        if bool(cell) != value:
            runs.append(0)
            value = bool(cell)
        runs[-1] += 1
    return runs


def compressed(mask: np.ndarray) -> bytes:
    return coco.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"]


def cells_of(polygons, extent, grid) -> list:
    return coco.decode(drawn(polygons, extent, grid)).tolist()


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_rles_of_both_forms_are_read(height, width, data):
    cells = data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    mask = np.array(cells).reshape(height, width)
    runs = runs_of(mask)
    for counts in (runs, compressed(mask), compressed(mask).decode()):
        shape = read_mask({"size": [height, width], "counts": counts})
        assert shape == Rle(height, width, tuple(runs))


def test_a_compressed_rle_with_long_runs():
    mask = np.zeros((400, 500), dtype=np.uint8)
    mask[0:5, 250], mask[8:, 250], mask[:, 251:] = 1, 1, 1
    long = read_mask({"size": [400, 500], "counts": compressed(mask)})
    assert long == Rle(400, 500, (100_000, 5, 3, 99_992))
    # the example in COCO's own documentation
    assert read_mask({"size": [9, 10], "counts": "61X13mN000`0"}) == Rle(9, 10, (6, 1, 40, 4, 5, 4, 5, 4, 21))


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
    assert mask_in("so " + json.dumps(LEFT)) is None  # polygons alone
    assert mask_in('<answer>{"polygon": [[0, 0], [1, 0], [1, 1]]}</answer>') == (((0, 0), (1, 0), (1, 1)),)
    assert mask_in("[0, 0, 1, 1] no, [0, 0, 2, 2]") == (((0, 0), (2, 0), (2, 2), (0, 2)),)
    assert mask_in("[0, 0, 1, 1] [cut off") == (((0, 0), (1, 0), (1, 1), (0, 1)),)
    assert mask_in("[[0, 0, 1, 1], [2, 2, 3, 3]]") is not None
    assert mask_in("no mask") is None and mask_in("[" * 100_000) is None


def test_polygons_are_drawn_by_the_centres_of_cells():
    triangle = read_mask([0, 0, 4, 0, 0, 4])
    assert triangle is not None
    assert cells_of(triangle, (4, 4), (4, 4)) == [
        [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]  # fmt: skip
    box = read_mask([1, 0, 3, 2])
    assert box is not None and cells_of(box, (4, 2), (2, 4)) == [[0, 1, 1, 0]] * 2


def test_mask_iou_in_pixels_of_two_sizes():
    seen, row = (Image.new("RGB", (28, 28)),), Sample("row:0", [], (Image.new("RGB", (56, 112)),))
    gold = [[0, 0], [28, 0], [28, 112], [0, 112]]  # the left half, in the original
    assert mask_iou("[0, 0, 14, 28]", gold, seen, row) == 1.0
    assert mask_iou("[0, 0, 28, 28]", gold, seen, row) == 0.5
    assert mask_iou("[0, 0, 14, 28]", [0, 0, 14, 28], seen, row, gold_space="pixel") == 1.0
    with pytest.raises(ValueError, match="empty on its grid"):  # of 512 cells in a row
        mask_iou("", [0, 0, 1000, 0.4], (Image.new("RGB", (1024, 1024)),))


SIDE = st.tuples(st.integers(0, 15), st.integers(1, 16)).map(lambda s: (s[0], min(16, s[0] + s[1])))


@given(st.tuples(SIDE, SIDE, SIDE, SIDE))
def test_mask_iou_is_symmetric_and_in_its_range(sides):
    boxes = [(x[0], y[0], x[1], y[1]) for x, y in (sides[:2], sides[2:])]
    one, other = ([n / 16 for n in box] for box in boxes)
    value = mask_iou(json.dumps(one), other, **UNIT)
    assert 0 <= value <= 1 and value == mask_iou(json.dumps(other), one, **UNIT)
    cells = [{(x, y) for x in range(b[0], b[2]) for y in range(b[1], b[3])} for b in boxes]
    assert value == len(cells[0] & cells[1]) / len(cells[0] | cells[1])


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        ([5, 5, 6, 6], {"gold_space": "normalized"}, "empty on its grid"),
        (SQUARE, {}, "the space 'original' need the image's size"),
        ([-1e7, 0, 1e7, 0, 0, 1], {"gold_space": "normalized"}, "500,000 cells around"),
    ],
)
def test_golds_that_cannot_be_drawn(mask, options, message):
    with pytest.raises(ValueError, match=message):
        mask_iou("[0, 0, 1, 1]", mask, **options)


@pytest.mark.parametrize(
    "completion",
    [
        '{"size": [100000, 100000], "counts": [10000000000]}',
        '{"size": [4, 4], "counts": "' + "P" * 100_000 + '"}',
        "[-1e7, -1e7, 1e7, -1e7, 1e7, 1e7]",
        "[1e7, 1e7, 1e7, 9999999, 9999999, 1e7]",
        json.dumps([[i % 2 * 900, i] for i in range(2000)]),
        '{"mask": ' * 600 + "1" + "}" * 600,
    ],
)
@pytest.mark.parametrize("gold", [SQUARE, LEFT])
def test_what_would_take_gigabytes_scores_0(completion, gold):
    start = time.thread_time()
    assert mask_iou(completion, gold, **UNIT) == 0.0
    assert time.thread_time() - start < 5  # 0.02 s at most


def test_the_largest_gold():
    half = {"size": [4000, 4000], "counts": [8_000_000, 8_000_000]}
    assert mask_iou("[0, 0, 1, 1]", half, space="normalized") == 0.5
