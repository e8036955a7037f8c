"""Rewards on right and wrong answers: what passes, what fails and why, and what is not judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers import tiny

from mm_grpo.config import DataConfig
from mm_grpo.data.sources import load
from mm_grpo.errors import by_cause
from mm_grpo.preflight.check import _result
from mm_grpo.preflight.gold_answers import RewardCheck, RewardReport
from mm_grpo.preflight.gold_text import as_text, gold_text
from mm_grpo.preflight.pass_rates import plain_rows
from mm_grpo.rewards import resolve_entry
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.types import EnginePrompt, Prompt, Sample

SEEN, HELD = (56, 84), (100, 200)
"""The sizes of the image as the model saw it, and as the dataset holds it: 0.56 and 0.42 of its pixels."""
BOX = [10, 20, 60, 120]


def image_prompt(**columns: Any) -> Prompt:
    """A row whose image is HELD in the dataset and SEEN by the model."""
    tensors: Any = None
    sample = Sample("train:0", [{"role": "user", "content": "?"}], (tiny.picture(0, *HELD),), (), columns)
    return Prompt(sample, (), EnginePrompt((), (tiny.picture(0, *SEEN),)), tensors, {})


def report_of(spec: RewardSpec, *rows: Prompt, **options: Any) -> RewardReport:
    check = RewardCheck([spec], **options)
    for number, row in enumerate(rows, start=1):
        check.add(f"rows.jsonl:{number}", row)
    (report,) = check.finish()
    return report


def prompt(index: int, **columns: Any) -> Prompt:
    tensors: Any = None
    sample = Sample(f"train:{index}", [{"role": "user", "content": "?"}], (), (), columns)
    return Prompt(sample, (), EnginePrompt((), ()), tensors, {})


def checked(entry: Any, answers: list[Any], *, column: str = "answer", **options: Any) -> RewardReport:
    rows = [prompt(index, **{column: answer}) for index, answer in enumerate(answers)]
    return report_of(resolve_entry(entry), *rows, **options)


def test_a_reward_that_tells_right_from_wrong_passes() -> None:
    report = checked("exact_match", ["red", "green", "blue", None])
    assert (report.failures, report.skipped, report.errors) == ([], "", 0)
    assert report.gold == [1.0, 1.0, 1.0] and report.unapplied == 1
    assert report.wrong == [0.0] * 9  # for each row two other answers and garbage


def by_kwargs(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(completion[0]["content"] == kwargs["label"][0]) for completion in completions]


def by_problem(completion: str, problem: str) -> float:
    return 0.0


@pytest.mark.parametrize(("fn", "gold"), [(by_kwargs, [1.0, 1.0]), (by_problem, [])])
def test_the_prompts_columns_are_no_gold(fn: Any, gold: list[float]) -> None:
    shown = frozenset({"problem"})
    rows = [prompt(n, problem=f"What is {n}?", label=f"label {n}") for n in range(2)]
    rows = [replace(row, sample=replace(row.sample, prompt_columns=shown)) for row in rows]
    report = report_of(resolve_entry(fn), *rows)
    assert (report.gold, report.failures) == (gold, []) and bool(report.skipped) is not bool(gold)


def test_selected_rows_are_written_as_prompts_images_and_other_columns() -> None:
    rows = [{"problem": "What?", "image": tiny.picture(0, 8, 6), "system": "x", "answer": "red"}]
    (row,) = plain_rows(load(rows, DataConfig()), [0])
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    (image,) = row.pop("images")
    assert image.size == (8, 6)
    system = {"role": "system", "content": "x"}
    assert row == {"prompt": [system, {"role": "user", "content": content}], "answer": "red"}


def says_number(completion: str, answer: int) -> float:
    return float(any(sign.isdigit() for sign in completion))


def always(completion: str, answer: str) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("fn", "answers", "failures"),
    [
        (says_number, [3, 4], ["1: the right answers of other rows score no less (says_number: '3' scores 1, '4' ",
                               "2: the right answers of other rows score no less (says_number: '4' scores 1, '3' "]),
        (always, ["a", "b"], [f"{n}: garbage scores no less (always: '{'.ab'[n]}' scores 0.5, '?!' " for n in (1, 2)]),
        (lambda completion, answer: None if "?" in completion else 1.0, ["a"], ["1: garbage scores no less"]),
    ],
)  # fmt: skip
def test_a_reward_that_does_not_fails_on_each_row(
    fn: Callable[..., Any], answers: list[Any], failures: list[str]
) -> None:
    found = checked(fn, answers).failures
    for text, expected in zip(found, failures, strict=True):
        assert text.startswith(f"rows.jsonl:{expected}")


def raises(completion: str, answer: str) -> float:
    raise ValueError(f"bad {completion!r}")


@pytest.mark.parametrize(
    "fn", [raises, lambda completion, answer: math.nan, lambda completion, answer: f"it's {answer}",
           lambda completions, answer: [1.0]]
)  # fmt: skip
def test_a_reward_that_fails_is_one_cause(fn: Callable[..., Any]) -> None:
    report = checked(fn, ["red", "it's", "blue", "green", "grey"])
    (line,) = by_cause(report.failures, report.rows)
    assert line.startswith(f"{report.errors} of 5 rows, the first rows.jsonl:1: ")


def test_a_built_in_must_give_1() -> None:
    report = checked("exact_match", ["red", "blue"], template="{gold} perhaps")
    assert len(report.failures) == 2
    assert "the right answer is not scored 1 (exact_match: 'red perhaps' scores 0)" in report.failures[0]
    ok = checked("exact_match", ["red", "blue"], template="<think>so</think> <answer>{gold}</answer>")
    assert ok.failures == [] and ok.gold == [1.0, 1.0]


def test_two_answers_that_mean_the_same_are_no_failure() -> None:
    def half(completion: str, answer: str) -> float:
        return float({"1/2": "0.5"}.get(completion, completion) == {"1/2": "0.5"}.get(answer, answer))

    assert checked(half, ["1/2", "0.5", "7"]).failures == []


def test_rewards_without_a_column_are_called_and_not_judged() -> None:
    report = checked({"name": "length", "max_length": 3, "unit": "characters"}, ["red", "blue"])
    assert report.skipped.startswith("not judged: it reads no column")
    assert report.gold == [] and report.failures == []
    assert min(report.wrong) < max(report.wrong) == 1.0  # the spread is told all the same
    assert _result(report) == report.skipped
    assert _result(checked(lambda completion: None, ["red", "blue"])).endswith("None to all")


def test_the_right_answer_is_the_first_column_that_is_read() -> None:
    def mine(completion: str, label: str, answer: str = "", solution: str = "") -> float:
        return 0.0

    spec = resolve_entry(mine)
    assert gold_text(spec, prompt(0, label="l", answer="a", solution="s")) == "s"
    assert gold_text(spec, prompt(0, label="l", answer="a")) == "a"
    assert gold_text(spec, prompt(0, label="l", other="o")) == "l"
    assert gold_text(spec, prompt(0, label=" ")) is None
    assert gold_text(spec, prompt(0, label="l"), r"\boxed{{gold}}") == r"\boxed{l}"
    assert gold_text(resolve_entry("exact_match"), prompt(0, answer=None)) is None
    assert [as_text(v) for v in (3, 3.0, 2.5, True, ["x", "y"], [1, 2], {"a": None})] == [
        "3", "3", "2.5", "true", "x", "[1, 2]", '{"a": null}',
    ]  # fmt: skip


def test_a_reward_whose_column_is_null_in_every_row_applies_nowhere() -> None:
    report = checked("exact_match", [None] * 70)
    assert (report.rows, report.unapplied, report.applies_nowhere) == (70, 70, True)
    once = checked("exact_match", [None] * 69 + ["red"])
    assert (once.rows, once.unapplied, once.applies_nowhere) == (70, 69, False)


def test_gates_and_weights_of_0_may_be_idle() -> None:
    assert not checked({"name": "exact_match", "weight": 0}, [None, None]).applies_nowhere
    gated = resolve_entry({"name": "exact_match", "only_if": "format"})
    report = report_of(gated, prompt(0, answer=None))
    assert report.unapplied == 1 and not report.applies_nowhere


def test_an_answer_in_several_turns_is_a_conversation_of_one() -> None:
    seen: list[Any] = []

    def first_turn(completion: str, turns: list[dict[str, Any]], answer: str) -> list[float]:
        seen.append((completion, [(turn["role"], turn["text"]) for turn in turns]))
        return [float(turns[0]["text"] == answer)]

    report = checked({"name": first_turn, "per_turn": True}, ["red", "blue"], several_turns=True)
    assert (report.failures, report.errors, report.gold) == ([], 0, [1.0, 1.0])
    assert set(report.wrong) == {0.0} and ("red", [("assistant", "red")]) in seen


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
        ({"name": "temporal_iou"}, {"interval": [[2.5, 4]]}, "[2.5, 4]"),
        ({"name": "temporal_iou", "space": "normalized", "gold_space": "normalized"}, {"interval": "[0.1, 0.4]"},
         "[0.1, 0.4]"),
        ({"name": "contains", "mode": "all"}, {"answer": ["cat", "dog"]}, "cat\ndog"),
        ({"name": "anls"}, {"answer": ["boeing", "airbus"]}, "boeing"),
        ({"name": "math"}, {"answer": "(2, -3)"}, r"\boxed{(2, -3)}"),
        ({"name": "math"}, {"answer": r"$(0, \infty)$"}, r"\boxed{(0, \infty)}"),
        ({"name": "math"}, {"answer": r"So \boxed{\frac{1}{2}}"}, r"\boxed{\frac{1}{2}}"),
        ({"name": "math"}, {"answer": "16 - 13 = 3\n#### 3"}, "16 - 13 = 3\n#### 3"),
        ({"name": "math"}, {"answer": "45°"}, r"\boxed{45°}"),
    ],
)  # fmt: skip
def test_built_ins_give_their_written_right_answers_1(
    entry: dict[str, Any], columns: dict[str, Any], text: str
) -> None:
    spec, row = resolve_entry(entry), image_prompt(**columns)
    assert gold_text(spec, row) == text
    report = report_of(spec, row, template="<think>so</think> <answer>{gold}</answer>")
    assert (report.gold, report.failures) == ([1.0], [])


def test_right_answers_are_tried_without_thinking_of_the_template() -> None:
    rows = [replace(image_prompt(answer=answer), opens_thinking=True) for answer in ("red", "blue")]
    report = report_of(resolve_entry({"name": "exact_match", "strip_thinking": True}), *rows)
    assert (report.gold, report.failures) == ([1.0, 1.0], [])


def test_a_reward_for_some_rows_is_tried_on_those() -> None:
    rows = [image_prompt(answer="red", task="name"), image_prompt(answer=3, task="count")] * 2
    report = report_of(resolve_entry({"name": "exact_match", "when": {"task": "name"}}), *rows)
    assert (report.gold, report.failures) == ([1.0, 1.0], [])
    assert (report.rows, report.unapplied, report.applies_nowhere) == (4, 2, False)


@pytest.mark.parametrize(
    ("entry", "column", "value", "words"),
    [
        ({"name": "iou", "gold_space": "pixel"}, "box", [10, 20, 90, 180], "56 × 84"),
        ("clicking", "target", [1, 2, 3], "the gold target is [1, 2, 3]"),
        ("box_match", "boxes", 3, "the gold boxes are '3'"),
        ("temporal_iou", "interval", [8, 4], "the gold interval is [8, 4]"),
    ],
)
def test_a_gold_that_means_nothing_is_found_by_the_reward(
    entry: Any, column: str, value: Any, words: str
) -> None:
    assert words in report_of(resolve_entry(entry), image_prompt(**{column: value})).failures[0]


def test_rows_without_a_right_answer_are_left_out() -> None:
    assert gold_text(resolve_entry("box_match"), image_prompt(boxes=[])) is None
    assert gold_text(resolve_entry("iou"), image_prompt(box=None)) is None
    report = report_of(resolve_entry("json_schema"), image_prompt(schema='{"type": "object"}'))
    assert report.skipped == "not judged: no column says what a right answer is" and report.failures == []


def test_the_image_that_the_reward_looks_at_is_the_one_that_counts() -> None:
    # the second image is held at 100 x 200 too, and seen at 200 x 100: twice as wide and half as high
    row = image_prompt(box=BOX)
    sample = replace(row.sample, images=(tiny.picture(0, *HELD), tiny.picture(1, *HELD)))
    seen = (tiny.picture(0, *SEEN), tiny.picture(1, 200, 100))
    row = replace(row, sample=sample, engine_prompt=EnginePrompt((), seen))
    spec = resolve_entry({"name": "iou", "image_index": 1})
    assert gold_text(spec, row) == "[20.0, 10.0, 120.0, 60.0]"
    report = report_of(spec, row)
    assert (report.gold, report.failures) == ([1.0], [])
