"""Gold and predicted boxes, polygons and points in pixels of the image as the model saw it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import tiny

from mm_grpo.rewards import resolve_entry
from mm_grpo.rewards.registry import BUILTINS
from mm_grpo.run.overlays import GOLD_COLUMNS, Overlay, gold_overlays, predicted_overlays
from mm_grpo.types import EnginePrompt, Prompt, Sample

SEEN, HELD = (56, 84), (100, 200)
"""The sizes of the image as the model saw it, and as the dataset holds it: 0.56 and 0.42 of its pixels."""


def prompt(**columns: Any) -> Prompt:
    tensors: Any = None
    sample = Sample("train:0", [{"role": "user", "content": "?"}], (tiny.picture(0, *HELD),), (), columns)
    return Prompt(sample, (), EnginePrompt((), (tiny.picture(0, *SEEN),)), tensors, {})


def rounded(marks: list[Overlay]) -> list[tuple[int, str, list[tuple[float, float]]]]:
    return [(m.image, m.label, [(round(x, 6), round(y, 6)) for x, y in m.points]) for m in marks]


BOX = [(5.6, 8.4), (33.6, 8.4), (33.6, 50.4), (5.6, 50.4)]


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        ({"name": "iou"}, {"box": [10, 20, 60, 120]}),
        ({"name": "giou", "gold_layout": "xywh"}, {"box": [10, 20, 50, 100]}),
        ({"name": "iou", "gold_space": "normalized"}, {"box": "[0.1, 0.1, 0.6, 0.6]"}),
        ({"name": "clicking"}, {"target": [10, 20, 60, 120]}),
        ({"name": "box_match"}, {"boxes": [[10, 20, 60, 120]]}),
        ({"name": "clicking"}, {"target": [[[10, 20], [60, 20], [60, 120], [10, 120]]]}),
    ],
)
def test_a_box_lies_where_its_space_says(entry: dict[str, Any], columns: dict[str, Any]) -> None:
    marks, notes = gold_overlays([resolve_entry(entry)], prompt(**columns))
    assert (rounded(marks), notes) == ([(0, entry["name"], BOX)], [])


def test_rewards_with_the_same_gold_share_a_mark() -> None:
    specs = [resolve_entry(name) for name in ("iou", "giou", "box_match", "exact_match")]
    boxes = [[10, 20, 60, 120], [0, 0, 50, 100]]
    marks, notes = gold_overlays(specs, prompt(box=boxes[0], boxes=boxes))
    assert [(m.label, rounded([m])[0][2]) for m in marks] == [
        ("iou, giou, box_match", BOX),
        ("box_match", [(0.0, 0.0), (28.0, 0.0), (28.0, 42.0), (0.0, 42.0)]),
    ]
    assert notes == []


def test_the_image_that_is_meant() -> None:
    row = prompt(box=[10, 20, 60, 120])
    images = (tiny.picture(1, 200, 100), tiny.picture(0, *HELD))
    seen = EnginePrompt((), (tiny.picture(1, 56, 28), tiny.picture(0, *SEEN)))
    row = replace(row, sample=replace(row.sample, images=images), engine_prompt=seen)
    marks, notes = gold_overlays([resolve_entry({"name": "iou", "image_index": 1})], row)
    assert (rounded(marks), notes) == ([(1, "iou", BOX)], [])
    _, notes = gold_overlays([resolve_entry({"name": "iou", "image_index": 2})], row)
    assert notes == ["iou: image_index=2, and the row has 2 image(s), counted from 0"]


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        ("iou", {"box": [0, 0, 150, 100]}),  # not in its image
        ("clicking", {"target": "here"}),
    ],
)
def test_what_cannot_be_drawn_is_a_note(entry: str, columns: dict[str, Any]) -> None:
    marks, (note,) = gold_overlays([resolve_entry(entry)], prompt(**columns))
    assert marks == [] and note.startswith(f"{entry}: ")


def test_rows_without_gold_or_image() -> None:
    without = replace(prompt(box=[0, 0, 1, 1]), engine_prompt=EnginePrompt((), ()))
    for row in (prompt(box=None), without):
        assert gold_overlays([resolve_entry("iou")], row) == ([], [])
        assert predicted_overlays([resolve_entry("iou")], row, "[1, 2, 30, 40]") == []


def test_every_reward_on_boxes_and_points_is_known() -> None:
    modules = ("grounding", "clicking")
    assert set(GOLD_COLUMNS) == {name for name, place in BUILTINS.items() if place.endswith(modules)}


@pytest.mark.parametrize(
    ("entry", "text", "points"),
    [
        ({"name": "iou"}, "[1, 2, 3, 4] or [5.6, 8.4, 33.6, 50.4]", [BOX]),  # of several the last counts
        ({"name": "giou", "space": "0-1000"}, "<think>[0, 0, 9, 9]</think>(100, 100), (600, 600)", [BOX]),
        ({"name": "iou", "space": "normalized", "layout": "xywh"}, "[0.1, 0.1, 0.5, 0.5]", [BOX]),
        ({"name": "box_match"}, "[5.6, 8.4, 33.6, 50.4] [0, 0, 28, 42]",
         [BOX, [(0.0, 0.0), (28.0, 0.0), (28.0, 42.0), (0.0, 42.0)]]),
        ({"name": "clicking", "space": "0-1000"}, "click(x=500, y=250)", [[(28.0, 21.0)]]),
        ({"name": "iou"}, "nowhere", []),
    ],
)  # fmt: skip
def test_a_prediction_lies_where_the_reward_reads_it(
    entry: dict[str, Any], text: str, points: list[list[tuple[float, float]]]
) -> None:
    gold: dict[str, Any] = {"box": [0, 0, 9, 9], "boxes": [], "target": [0, 0, 9, 9]}
    marks = predicted_overlays([resolve_entry(entry)], prompt(**gold), text)
    assert rounded(marks) == [(0, entry["name"], each) for each in points]


def test_predictions_are_shared_and_those_of_rewards_that_apply() -> None:
    specs = [resolve_entry(name) for name in ("iou", "giou", "exact_match")]
    (mark,) = predicted_overlays(specs, prompt(box=[0, 0, 9, 9]), "[1, 2, 30, 40]")
    assert mark.as_dict() == {
        "image": 0, "label": "iou, giou", "points": [[1.0, 2.0], [30.0, 2.0], [30.0, 40.0], [1.0, 40.0]]
    }  # fmt: skip
    (by_column,) = predicted_overlays(specs, prompt(box=[0, 0, 9, 9], layout="xywh"), "[1, 2, 29, 38]")
    assert by_column == mark  # the reward gets the column too
    elsewhere = resolve_entry({"name": "iou", "image_index": 3})
    assert predicted_overlays([elsewhere], prompt(box=[0, 0, 9, 9]), "[1, 2, 30, 40]") == []
