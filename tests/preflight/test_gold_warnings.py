"""Golds that look like no answer: kinds that are named, and honest golds that are not."""

from __future__ import annotations

import itertools
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_train
from mm_grpo.preflight.gold_warnings import TEXTS, GoldWarnings, warn_of_golds
from mm_grpo.rewards import resolve_entry
from mm_grpo.rewards.resolve import resolve_entries

EXAMPLES = Path(__file__).parents[2] / "examples"
LETTERED = "What is it? A. a cat B. a dog\nC. a bird"
LETTER = LETTERED + " Answer with the option's letter."
LONG = "it " * 20 + "is a red bus that " * 5 + "stops"  # 46 words
MESSAGES = '[{"role": "assistant", "content": "tram"}]'
WORDS = [f"word{number}" for number in range(20)]
SPLIT = [[0, 0, 3, 3], [10, 10, 90, 40], [0.5, 0.5, 60, 90]]
SHARES = [[0.1, 0.2, 0.18, 0.3], [0, 0.5, 1, 1]]


class Letters:
    """A tokenizer of letters."""

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*map(ord, text)] for text in texts]}


def kinds(entry: Any, golds: list[Any], prompt: str = "?", source: str = "train", **extra: Any) -> set[str]:
    """The kind of each warning."""
    spec, options = resolve_entry(entry), {k: extra.pop(k) for k in ("template", "limit") if k in extra}
    warnings = GoldWarnings([spec], tokenizer=Letters() if options else None, **options)
    for number, gold in enumerate(golds, start=1):
        columns = {(spec.needs or ("answer",))[0]: gold, **extra}
        warnings.add(source, f"rows.jsonl:{number}", [{"role": "user", "content": prompt}], columns)
    sentences = warnings.sentences()
    for sentence in sentences:
        assert sentence.startswith(f"{source}, ") and repr(spec.name) in sentence
    return {kind for kind, text in TEXTS.items() for sentence in sentences if text in sentence}


NAMED: list[tuple[str, Any, list[Any], dict[str, Any]]] = [
    # lists, mappings and messages
    ("structures", "exact_match", ["tram", '{"answer": "tram"}'], {}),
    ("structures", "contains", [MESSAGES], {"prompt": "Write JSON."}),
    ("structures", "math", ["[{'from': 'gpt', 'value': '3'}]"], {}),
    ("structures", "anls", ["[]", "tram"], {}),
    ("structures", "chart_relaxed", ["[['a', 'b']]", "7"], {}),
    ("structures", "exact_match", ["[10, 20, 30, 40]", "[1, 2, 3, 4]"], {}),
    ("lists", "exact_match", ["['tram']", "bus"], {}),
    ("lists", "anls", ["['tram' 'bus']", "[]"], {"prompt": "Write a list."}),
    ("lists", "contains", ["['cat', 'dog']", "['bus']"], {"prompt": "Name all things as a JSON array."}),
    # reasoning
    ("reasoning", "exact_match", ["3", "16 - 13 = 3\n#### 3"], {}),
    ("reasoning", "exact_match", ["<reasoning>two and one</reasoning> 3"], {}),
    ("reasoning", "anls", [r"It is \boxed{3}"], {}),
    ("reasoning", "contains", ["<think>never closed 3"], {}),
    ("reasoning", "exact_match", ["bus", LONG], {}),
    ("reasoning", "math", [LONG + " 3"], {}),
    ("reasoning", "choice", [LONG + "\nThe answer is B."], {}),
    ("reasoning", "anls", [LONG, "bus"], {}),
    ("reasoning", "exact_match", ["因为图中有三个圆形" * 10], {}),
    # boxes
    *(("small", name, SHARES, {}) for name in ("iou", "giou", "clicking")),
    ("small", "box_match", [[box] for box in SHARES], {}),
    ("small", {"name": "iou", "gold_space": "0-1000"}, SHARES, {}),
    ("small", {"name": "iou", "gold_layout": "xywh"}, ["[0.1, 0.1, 0.2, 0.2]"], {}),
    ("small", "clicking", [[[0.1, 0.1], [0.3, 0.1], [0.2, 0.4]]], {}),
    ("small", "iou", [[0, 0, 1, 1], [1, 1, 2, 2]], {}),
    # intervals
    ("small", "temporal_iou", [[0.2, 0.5], "[[0, 0.4]]"], {}),
    # options
    ("options", "exact_match", [0, 2, 1], {"prompt": LETTERED}),
    ("options", "exact_match", ["1", "0"], {"choices": "['tram', 'cow']"}),
    ("options", "anls", ["a cat", "a dog"], {"prompt": LETTER}),
    ("options", "exact_match", ["A", "B"], {"prompt": "cat or dog?", "options": ["cat", "dog"]}),
    ("options", "exact_match", ["A. a cat", "(B) a dog"], {"prompt": LETTER}),
    ("letters", "contains", ["A", "(B)", "C"], {"prompt": LETTER}),
    ("options", "choice", ["(A)", "B"], {"prompt": "cat or dog?", "choices": ["cat", "dog"]}),
    # tokens
    ("tokens", "exact_match", ["red", "yellow"], {"limit": 5}),
    ("tokens", "exact_match", ["red"], {"limit": 5, "template": "<{gold}>."}),
    ("tokens", "edit_similarity", ["a page"], {"limit": 5}),
    ("tokens", "anls", [["orange", "yellow"]], {"limit": 5}),
    # values of pandas and JSON
    *(("missing", "exact_match", ["tram", text], {}) for text in ("nan", "<NA>", " NaT", ["nan"])),
    ("missing", "edit_similarity", ["nan"], {}),
    *(
        ("booleans", name, [True, False], {"prompt": "Yes or no?"})
        for name in ("exact_match", "contains", "anls")
    ),
    ("bits", "exact_match", [0, "1"], {"prompt": "Look. Is the red bar the lowest?"}),
    ("floats", "exact_match", ["3.0", "12.0", "4.5"], {}),
    # equal golds
    ("alike", "exact_match", ["tram"] * 8, {}),
    ("alike", "numeric", [0] * 11 + [3, 4, 5, 6, 7, 8, 9, 1, 2], {}),
    ("alike", "exact_match", ["unknown"] * 13 + WORDS[:12], {}),
    ("alike", "exact_match", ["yes"] * 16 + ["no"] * 4, {}),
    ("alike", "count", [1] * 11 + [2] * 5 + [3] * 4, {}),
    ("alike", "iou", [[0, 0, 9, 9]] * 8, {}),
]
HONEST: list[tuple[Any, list[Any], dict[str, Any]]] = [
    ("exact_match", [["tram", "tram stop"], ["bus"]], {}),  # a real list
    ("exact_match", ["['tram', 'tram stop']", "['bus']"], {}),  # all rows
    ("exact_match", [["['tram']"], "bus"], {}),
    ("exact_match", ["[1, 2, 3]", "{'a': 1}", "['a', ['b']]"], {"prompt": "What does this code print?"}),
    ("exact_match", ["[12]", "tram", "bus"], {}),  # a text in a picture
    ("exact_match", ["<b>tram</b>", "a < b", "(a) or (b)", "{x}"], {}),
    ("exact_match", [{"name": "x"}["name"], None, " ", 3.0], {}),
    ("math", ["[0, 1)", "[2, 3]", "{1, 2}", "[[1, 2], [3, 4]]", "(1, 2)", r"\frac{1}{2}"], {}),
    ("json_schema", ['{"a": 1}'], {}),
    ("edit_similarity", ['{"total": 3}', LONG], {}),
    *((name, ["<think>so</think> <answer> 3 </answer>"] * 2, {}) for name in ("exact_match", "anls", "count")),
    ("exact_match", [r"So \boxed{3}"], {}),
    ("math", ["16 - 13 = 3\n#### 3", r"It is so \boxed{3}", LONG + r" \boxed{3}"], {}),
    ("math", [" & ".join(r"\frac{1}{2}" for _ in range(30))], {}),
    ("contains", [LONG], {}),
    ("anls", [LONG, *WORDS], {}),
    ("exact_match", [[LONG, "bus"]], {}),
    ({"name": "judge", "model": "m", "url": "http://h/v1"}, [LONG, MESSAGES], {}),
    (lambda completion, answer: 1.0, [LONG, MESSAGES, "#### 3", "#### 3"] * 9, {"limit": 5}),
    *((name, SPLIT, {}) for name in ("iou", "giou", "clicking")),
    ({"name": "iou", "gold_space": "normalized"}, SHARES, {}),
    ("box_match", [[], [[0, 0, 9, 9]]], {}),
    ("temporal_iou", [[0.2, 0.5], [1, 2]], {}),
    ("temporal_iou", ["no interval", [2, 1]], {}),  # the reward refuses them
    ({"name": "temporal_iou", "gold_space": "normalized"}, [[0.2, 0.5]], {}),
    ({"name": "clicking", "reach": 0.1}, [[9.5, 9.5, 10.5, 10.5]], {}),
    ("iou", [[5, 5, 5, 5], "no box"], {}),  # the reward refuses them
    ("exact_match", ["A", "B"], {"prompt": LETTER}),
    ("contains", ["A", "tram", "bus"], {}),
    ("exact_match", ["tram", "cow"], {"choices": [{"id": 0, "choice": "tram"}]}),
    ("exact_match", [0, 1], {"prompt": "Is it red? Answer with 1 or 0."}),
    ("exact_match", ["0", "1"], {"prompt": "How many are there?"}),
    ("exact_match", [{"text": ["tram"]}, b"tram"], {}),  # the reward refuses them
    ("choice", ["A", "B"], {"prompt": LETTERED, "choices": ["a cat", "a dog"]}),
    ("exact_match", ["1", "2"], {"choices": {"A": "cat", "B": "dog"}}),
    ("exact_match", [date(2026, 1, 2)], {}),  # the reward refuses it
    ("exact_match", ["B", "A"], {"choices": ["cat", "dog"]}),  # the picture may show them
    ("exact_match", ["a cat", "a dog"], {"prompt": LETTERED}),
    ("exact_match", ["1", "2"], {"prompt": "1. a cat 2. a dog", "choices": ["a cat", "a dog"]}),
    ("exact_match", ["2", "3"], {"prompt": "How many? A. 2 B. 3 C. 4"}),
    ("exact_match", ["2", "3"], {"prompt": "How many of J. A. Smith?"}),
    ("exact_match", ["cat", "dog"], {"prompt": "Which letter is on the sign?"}),
    ("exact_match", [["yellow", "red"]], {"limit": 5}),
    ("exact_match", ["<think>long enough</think>red"], {"limit": 3}),
    ("contains", ["red"], {"limit": 5, "template": "<{gold}>"}),
    ("exact_match", ["yes"] * 15 + ["no"] * 5, {}),
    ("exact_match", ["A", "B"] * 5 + ["A"] * 5 + ["C"] * 5, {}),
    ("exact_match", ["yes"] * 18 + ["no"], {}),
    ("exact_match", ["none", "null", "nan bread", ["nan", "naan"]], {}),
    ("exact_match", [True, False], {"prompt": "True or false?"}),
    ("count", ["3", True], {"prompt": "Say True."}),
    ("exact_match", ["tram"] * 7, {}),
    ("exact_match", [[None], [" "], []] * 9, {"limit": 1}),
    ("exact_match", ["tram"] * 9, {"source": "train/trams"}),
    ("exact_match", ["tram"] * 10 + WORDS[:10], {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "entry", "golds", "row"), NAMED)
def test_golds_that_look_like_no_answer_are_named(kind: str, entry: Any, golds: list[Any], row: Any) -> None:
    assert kinds(entry, golds, **row) == {kind}


@pytest.mark.parametrize(("entry", "golds", "row"), HONEST)
def test_honest_golds_are_not(entry: Any, golds: list[Any], row: dict[str, Any]) -> None:
    assert kinds(entry, golds, **row) == set()


def test_a_warning_has_count_first_row_and_value() -> None:
    warnings = GoldWarnings([resolve_entry("exact_match")])
    for number, gold in enumerate(["tram", "#### 7", None, "#### 8"], start=1):
        warnings.add("train", f"rows.jsonl:{number}", [], {"answer": gold})
    (sentence,) = warnings.sentences()
    assert "2 of 3" in sentence and "rows.jsonl:2: '#### 7'" in sentence and "#### 8" not in sentence


def test_each_source_and_reward_is_counted_alone() -> None:
    """The first rows of a set may be of one class: with `alike=False` equal golds are no warning."""
    warnings = GoldWarnings(resolve_entries([{"name": "count", "when": {"task": "count"}}, "exact_match"]))
    for number in range(8):
        columns = {"answer": "[['a']]" if number == 7 else "3", "task": "count" if number < 4 else "read"}
        warnings.add(f"train/{number % 2}", f"row {number}", [], columns)
    (sentence,) = warnings.sentences()
    assert sentence.startswith("train/1, ") and "1 of 4" in sentence
    for number in range(9):
        warnings.add("eval", f"row {number}", [], {"answer": 3, "task": "read"})
    assert len(warnings.sentences()) == 2 and len(warnings.sentences(alike=False)) == 1


TASKS = {
    **{kind: {"task": "shapes", "kinds": [kind]} for kind in ("colour", "shape", "count", "position")},
    "shapes": {"task": "shapes", "kinds": ["colour", "shape", "count", "position"]},
    "digits": {"task": str(EXAMPLES / "digits/digits.py:digits_rows")},
    "zoom": {"task": str(EXAMPLES / "zoom/patterns.py:patterns_rows")},
}


@pytest.mark.parametrize(
    ("task", "size"),
    [
        *((task, 500) for task in TASKS),
        *(pytest.param(task, 20_000, marks=pytest.mark.slow) for task in ("shapes", "digits", "zoom")),
    ],
)
def test_rows_of_synthetic_tasks_give_no_warning(task: str, size: int, caplog: Any) -> None:
    if task == "digits":
        pytest.importorskip("sklearn")
    entries = ["exact_match", "contains", "anls", "edit_similarity", "chart_relaxed"]
    entries += ["iou"] if task == "zoom" else []
    config = GRPOConfig.from_dict({"model": {"path": "m"}, "rewards": entries})
    rows = load_train(config, {**TASKS[task], "split": "train", "size": size})
    specs = resolve_entries(entries)
    started = time.process_time()
    warn_of_golds([rows], specs)
    assert caplog.messages == [] and time.process_time() - started < 10 + size / 1_000


def test_many_rows_are_quick() -> None:
    specs = resolve_entries(["exact_match", {"name": "anls", "weight": 0.5}])
    warnings, golds = GoldWarnings(specs), itertools.cycle([*WORDS, "['a', 'b']", "3", "A"])
    started = time.process_time()
    for number in range(10_000):
        messages = [{"role": "user", "content": LETTER * 3}]
        warnings.add("train", f"row {number}", messages, {"answer": next(golds)})
    assert time.process_time() - started < 6
