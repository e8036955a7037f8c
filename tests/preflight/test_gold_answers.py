"""Rewards on right and wrong answers: what passes, what fails and why, and what is not judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from mm_grpo.errors import by_cause
from mm_grpo.preflight.gold_answers import RewardCheck, RewardReport
from mm_grpo.preflight.gold_text import as_text, gold_text
from mm_grpo.rewards import resolve_entry
from mm_grpo.types import EnginePrompt, Prompt, Sample


def prompt(index: int, **columns: Any) -> Prompt:
    tensors: Any = None
    sample = Sample(f"train:{index}", [{"role": "user", "content": "?"}], (), (), columns)
    return Prompt(sample, (), EnginePrompt((), ()), tensors, {})


def checked(entry: Any, answers: list[Any], *, column: str = "answer", **options: Any) -> RewardReport:
    check = RewardCheck([resolve_entry(entry)], **options)
    for index, answer in enumerate(answers):
        check.add(f"rows.jsonl:{index + 1}", prompt(index, **{column: answer}))
    (report,) = check.finish()
    return report


def test_a_reward_that_tells_right_from_wrong_passes() -> None:
    report = checked("exact_match", ["red", "green", "blue", None])
    assert (report.failures, report.skipped, report.errors) == ([], "", 0)
    assert report.gold == [1.0, 1.0, 1.0] and report.unapplied == 1
    assert report.wrong == [0.0] * 9  # for each row two other answers and garbage


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
def test_one_that_does_not_fails_on_each_row(
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


def test_which_text_is_the_right_answer() -> None:
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
    check = RewardCheck([gated])
    check.add("rows.jsonl:1", prompt(0, answer=None))
    (report,) = check.finish()
    assert report.unapplied == 1 and not report.applies_nowhere


def test_in_a_run_of_several_turns_an_answer_is_a_conversation_of_one() -> None:
    seen: list[Any] = []

    def first_turn(completion: str, turns: list[dict[str, Any]], answer: str) -> list[float]:
        seen.append((completion, [(turn["role"], turn["text"]) for turn in turns]))
        return [float(turns[0]["text"] == answer)]

    report = checked({"name": first_turn, "per_turn": True}, ["red", "blue"], several_turns=True)
    assert (report.failures, report.errors, report.gold) == ([], 0, [1.0, 1.0])
    assert set(report.wrong) == {0.0} and ("red", [("assistant", "red")]) in seen
