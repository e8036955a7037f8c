"""The right answers that `check` writes are worth 1 to the built-ins that read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import tiny

from mm_grpo.preflight.gold_answers import RewardCheck
from mm_grpo.preflight.gold_text import gold_text
from mm_grpo.rewards import resolve_entry
from mm_grpo.types import EnginePrompt, Prompt, Sample

SEEN, HELD = (56, 84), (100, 200)
"""The sizes of the image as the model saw it, and as the dataset holds it: 0.56 and 0.42 of its pixels."""
BOX = [10, 20, 60, 120]


def prompt(**columns: Any) -> Prompt:
    tensors: Any = None
    sample = Sample("train:0", [{"role": "user", "content": "?"}], (tiny.picture(0, *HELD),), (), columns)
    return Prompt(sample, (), EnginePrompt((), (tiny.picture(0, *SEEN),)), tensors, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "columns", "text"),
    [
        ({"name": "iou"}, {"box": BOX}, "[5.6, 8.4, 33.6, 50.4]"),
        ({"name": "iou", "space": "normalized"}, {"box": BOX}, "[0.1, 0.1, 0.6, 0.6]"),
        ({"name": "iou", "gold_space": "pixel", "gold_layout": "xywh"}, {"box": [10, 20, 30, 40]},
         "[10.0, 20.0, 40.0, 60.0]"),
        ({"name": "giou", "layout": "yxyx"}, {"box": BOX}, "[8.4, 5.6, 50.4, 33.6]"),
        ({"name": "box_match"}, {"boxes": [BOX, [0, 0, 50, 50]]}, "[5.6, 8.4, 33.6, 50.4] [0.0, 0.0, 28.0, 21.0]"),
        # the tallest band of the L is its lower one, between 70 and 200: 50 wide, with its middle at (25, 135)
        ({"name": "clicking"}, {"target": [0, 0, 90, 0, 90, 70, 50, 70, 50, 200, 0, 200]}, "[14.0, 56.7]"),
        ({"name": "clicking", "space": "0-1000"}, {"target": BOX}, "[350.0, 350.0]"),
        ({"name": "contains", "mode": "all"}, {"answer": ["cat", "dog"]}, "cat\ndog"),
        ({"name": "anls"}, {"answer": ["boeing", "airbus"]}, "boeing"),
    ],
)  # fmt: skip
def test_built_ins(entry: dict[str, Any], columns: dict[str, Any], text: str) -> None:
    spec, row = resolve_entry(entry), prompt(**columns)
    assert gold_text(spec, row) == text
    check = RewardCheck([spec], template="<think>so</think> <answer>{gold}</answer>")
    check.add("row", row)
    (report,) = check.finish()
    assert (report.gold, report.failures) == ([1.0], [])


def test_right_answers_are_tried_without_the_thinking_that_a_template_opens() -> None:
    check = RewardCheck([resolve_entry({"name": "exact_match", "strip_thinking": True})])
    for answer in ("red", "blue"):
        check.add("row", replace(prompt(answer=answer), opens_thinking=True))
    (report,) = check.finish()
    assert (report.gold, report.failures) == ([1.0, 1.0], [])


def test_a_reward_for_some_rows_is_tried_on_those() -> None:
    check = RewardCheck([resolve_entry({"name": "exact_match", "when": {"task": "name"}})])
    for task in ("name", "count", "name", "count"):
        check.add("row", prompt(answer="red" if task == "name" else 3, task=task))
    (report,) = check.finish()
    assert (report.gold, report.failures) == ([1.0, 1.0], [])
    assert (report.rows, report.unapplied, report.applies_nowhere) == (4, 2, False)


@pytest.mark.parametrize(
    ("entry", "column", "value", "words"),
    [
        ({"name": "iou", "gold_space": "pixel"}, "box", [10, 20, 90, 180], "56 × 84"),
        ("clicking", "target", [1, 2, 3], "the gold target is [1, 2, 3]"),
        ("box_match", "boxes", 3, "the gold boxes are '3'"),
    ],
)
def test_a_gold_that_means_nothing_is_found_by_the_reward(
    entry: Any, column: str, value: Any, words: str
) -> None:
    check = RewardCheck([resolve_entry(entry)])
    check.add("row", prompt(**{column: value}))
    (report,) = check.finish()
    assert words in report.failures[0]


def test_rows_without_a_right_answer_are_left_out() -> None:
    assert gold_text(resolve_entry("box_match"), prompt(boxes=[])) is None
    assert gold_text(resolve_entry("iou"), prompt(box=None)) is None
    check = RewardCheck([resolve_entry("json_schema")])
    check.add("row", prompt(schema='{"type": "object"}'))
    (report,) = check.finish()
    assert report.skipped == "not judged: no column says what a right answer is" and report.failures == []


def test_the_image_that_the_reward_looks_at_is_the_one_that_counts() -> None:
    # the second image is held at 100 x 200 too, and seen at 200 x 100: twice as wide and half as high
    row = prompt(box=BOX)
    sample = replace(row.sample, images=(tiny.picture(0, *HELD), tiny.picture(1, *HELD)))
    seen = (tiny.picture(0, *SEEN), tiny.picture(1, 200, 100))
    row = replace(row, sample=sample, engine_prompt=EnginePrompt((), seen))
    spec = resolve_entry({"name": "iou", "image_index": 1})
    assert gold_text(spec, row) == "[20.0, 10.0, 120.0, 60.0]"
    check = RewardCheck([spec])
    check.add("row", row)
    (report,) = check.finish()
    assert (report.gold, report.failures) == ([1.0], [])
