"""Rewards for some rows (`when`) and without thinking (`strip_thinking`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from reward_entries import fails

from mm_grpo.rewards import Scorer
from mm_grpo.rewards.options import read_options
from mm_grpo.rewards.thinking import without_thinking

DATASET = [
    {"task": "grounding", "box": [0, 0, 1, 1]},
    {"task": "count", "answer": "3"},
    {"task": "count", "answer": "4", "level": 2},
]


def entry(fn: Callable[..., Any], **settings: Any) -> dict[str, Any]:
    return {"name": fn, "as": fn.__name__, **settings}


def near(completion: str, box: Any) -> float:
    return 1.0


def check(given: Any, rows: list[dict[str, Any]] = DATASET, **options: Any) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    Scorer([given]).check(columns, lambda: iter(rows), **options)


def test_a_reward_scores_the_rows_that_it_is_for_and_is_not_called_for_others(rows):
    asked: list[Any] = []

    def near(completion, box):
        asked.append((completion, box))
        return 1.0

    def right(completions, answer, **kwargs):
        asked.append((completions[0][0]["content"], answer))
        return [0.5] * len(completions)

    def both(completion):
        return 0.25

    entries = [
        entry(near, when={"task": "grounding"}),
        entry(right, when={"task": ["count", "other"]}),
        entry(both, when={"task": ["count", "grounding"], "level": [2, None]}),
    ]
    texts = rows("abc", task=["grounding", "count", "count"], box=[[0, 1], None, None], answer=[None, "3", "4"],
                 level=[None, 1, 2])  # fmt: skip
    scores = Scorer(entries).score(*texts, step=1)
    assert asked == [("a", [0, 1]), ("b", ["3", "4"])]
    assert scores.parts == {
        "near": [1.0, None, None], "right": [None, 0.5, 0.5], "both": [0.25, None, 0.25],
    }  # fmt: skip
    assert scores.totals == [1.25, 0.5, 0.75]
    assert scores.metrics["rewards/near/none"] == 2.0 and scores.metrics["rewards/right/mean"] == 0.5


def test_a_value_matches_a_value_of_its_own_type() -> None:
    options = read_options("r", {"when": {"level": [1, "2", True]}})
    assert options.when == {"level": (1, "2", True)}
    found = [options.is_for({"level": value}) for value in (1, 1.0, "1", 2, "2", True, False, None, [1])]
    assert found == [True, False, False, False, True, True, False, False, False]
    assert not options.is_for({}) and read_options("r", {"when": {"level": None}}).is_for({})


def test_columns_are_demanded_of_the_rows_that_a_reward_is_for():
    check(entry(near, when={"task": "grounding"}))
    check({"name": "exact_match", "when": {"task": "count"}})
    check(entry(near, when={"task": "count"}), DATASET[:1], trained=False)  # an evaluation set of one task
    # the dataset has the column, but not in these rows
    with fails("reward 'near' asks for 'box', .*columns: task, answer, level"):
        check(entry(near, when={"task": "count"}))
    with fails("'exact_match' asks for 'answer'"):
        check({"name": "exact_match", "when": {"task": "grounding"}})


def test_a_when_that_no_row_has_is_refused_with_the_values_that_exist():
    absent = entry(near, when={"task": "grouding"})
    with fails("reward 'near': when is .*'grouding'.* in its rows task is 'grounding', 'count'"):
        check(absent)
    check(absent, trained=False)
    with fails("task is 'grounding', 'count'; level is None, 2"):
        check(entry(near, when={"task": "grounding", "level": 2}))
    with fails("task is '0', '1', '2', .*'11' "):
        check(absent, [{"task": str(i)} for i in range(40)])
    check(absent, [*({"task": "count"} for _ in range(500)), {"task": "grouding", "box": []}])


def test_a_when_on_an_unknown_column_is_refused_in_every_set(trained=False):
    with fails("'near': when names the column 'taks', .*did you mean 'task'. .*task, box, answer, level"):
        check(entry(near, when={"taks": "grounding"}), trained=trained)


@pytest.mark.parametrize("value", ["grounding", {}, {"task": {"a": 1}}])
def test_a_wrong_when_is_refused(value):
    with fails("^reward 'length': when"):
        Scorer([{"name": "length", "max_length": 3, "when": value}])


@pytest.mark.parametrize(
    ("text", "answer", "opened"),
    [
        ("<think>a</think>\n\nb", "b", "b"),
        ("a</think>b", "b", "b"),
        ("<think>a", "", ""),
        ("a", "a", ""),
        ("<think>a</think>b<think>c", "", ""),
        ("<think>a</think>b<think>c</think> d", "d", "d"),
    ],
)
def test_thinking_is_taken_off(text, answer, opened):
    assert without_thinking(text) == answer
    assert without_thinking(text, opened=True) == opened


def test_only_the_rewards_that_ask_for_it_get_no_thinking(rows):
    got: dict[str, Any] = {}

    def whole(completion, completion_ids):
        got.setdefault("whole", []).append(completion)
        return 0.0

    def stripped(completion, completion_ids):
        got.setdefault("stripped", []).append((completion, len(completion_ids)))
        return 0.0

    def batch(completions, **kwargs):
        got.setdefault("batch", []).append(completions)
        return [0.0] * len(completions)

    entries = [
        entry(whole),
        *(entry(function, strip_thinking=True) for function in (stripped, batch)),
        {"name": batch, "as": "texts", "strip_thinking": True, "completions": "text"},
        {"name": "contains", "strip_thinking": True},
        {"name": "contains", "as": "of_all"},
    ]
    prompts, completions = rows(["<think>3?</think> 4", "4", "hm</think>4", "it is 4"], answer=["4"] * 4)
    prompts[2:] = [dataclasses.replace(prompt, opens_thinking=True) for prompt in prompts[2:]]
    scores = Scorer(entries).score(prompts, completions, step=1)
    assert got["whole"] == ["<think>3?</think> 4", "4", "hm</think>4", "it is 4"]
    assert got["stripped"] == [("4", 19), ("4", 1), ("4", 11), ("", 7)]
    messages = [[{"role": "assistant", "content": text}] for text in ("4", "4", "4", "")]
    assert got["batch"] == [messages, ["4", "4", "4", ""]]
    # the built-ins read what follows </think> themselves, but take thinking that is never closed for an answer
    assert scores.parts["contains"] == [1.0, 1.0, 1.0, 0.0]
    assert scores.parts["of_all"] == [1.0, 1.0, 1.0, 1.0]
