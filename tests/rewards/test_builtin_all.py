"""What holds for every built-in: its docstring, rows without gold, hostile texts."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mm_grpo.errors import RewardError
from mm_grpo.rewards import builtins, get, names, resolve_entry
from mm_grpo.rewards.registry import BUILTINS

HUGE = 10_000
MODULES = [module.name for module in pkgutil.iter_modules(builtins.__path__)]

# One way to call each that is a plain function, and the scores it may give to garbage.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "anls": {"answer": "boeing"},
    "box_match": {"boxes": [[0, 0, 10, 10], [20, 20, 30, 30]]},
    "chart_relaxed": {"answer": "42"},
    "choice": {"answer": "B"},
    "clicking": {"target": [[1000, 1000], [1001, 1000], [1000, 1001]]},
    "contains": {"answer": "tabby"},
    "count": {"answer": 77},
    "edit_similarity": {"answer": "the quick brown fox"},
    "exact_match": {"answer": "gold"},
    "format": {"template": "<think>...</think> <answer>...</answer>"},
    "giou": {"box": [0, 0, 10, 20]},
    "iou": {"box": [0, 0, 10, 20]},
    "json_schema": {"schema": {"type": "object"}},
    "length": {"max_length": 10},
    "math": {"answer": "77"},
    "numeric": {"answer": 77},
    "repetition_penalty": {},
    "soft_overlong": {"completion_ids": [1, 2, 3], "max_length": 10, "buffer": 5},
    "temporal_iou": {"interval": [5, 10]},
}
RANGES = {"giou": (-1, 1), "repetition_penalty": (-1, 0), "soft_overlong": (-1, 0)}
# Each is repeated to a text of HUGE characters.
PIECES = [
    *"([{}])<>|\"'*$\\,.;:-+/%^_#`=\n\t 0129Aeé猫\u0301\u200b\x00\U0001f600", "[[", "[0,", "[0,0,", "(1,2),", "1 ",
    "1,", "1,111,", "1.", "-1", "1e", "1/", "1/2 ", "½", "٣", "３", "[1e400,", "NaN,", "[NaN, NaN, NaN, NaN] ",
    "[0,0,1,1]", "[0, 0, 10, 10] ", "(5, 5) ", "x=1, y=1 ", "x=", "A,", "A or ", "A) \n", "answer ", "Answer: ",
    "the answer is ", "option ", "A is ", "**", "<answer>", "</answer>", "<think>", "</think>", "\\boxed{",
    "\\frac{", "\\frac{1}{2}", "\\sqrt", "^{", "\\(", "twenty ", "one hundred ", "twenty-", "Score: ",
    "Answer: A, ", "a b c ", '{"a":', "a\u0301\u0323", "<think>x</think> ", "<think>x</think> <answer>",
    "[1, 2] ", "0:", "0:00:", "0:03 - ", "1 to 2 ", "start ", "start 1 end ", "between 1 and ",
]  # fmt: skip
# Of each reward the values that mean nothing, of its gold column and of its options.
REFUSED: list[tuple[str, str, list[Any]]] = [
    ("box_match", "boxes", [[3], "no box", {"x": 1}]),
    ("box_match", "threshold", [0, 1.5]),
    ("choice", "answer", ["F", "AB"]),
    ("choice", "letters", ["abc", "A", "ABA"]),
    ("clicking", "target", [[1, 2, 3], [1, 2, 3, math.nan], [1, 2, 3, 4, 5, math.nan], [5, 5, 1, 1], "here",
                            [5, 0, 5, 5, 5, 10], "[" * 100_000]),
    ("clicking", "reach", [0, 2]),
    ("contains", "mode", ["most"]),
    ("count", "answer", ["red", 2.5, "-1", "5 %", "two hundred", "10+", "3-4", ">5", "cats: 3, dogs: 2", "3 dozen",
        "two cats and one dog", "more than 10"]),
    ("format", "template", ["", "<a>......</a>", "<answer></answer>", "<a>…</a>", r"<a>.*?</a>"]),
    ("format", "pattern", ["a"]),
    ("iou", "box", [(1, 2, 3), (1, 2, 3, math.nan), [False, 0, 1, 1], (5, 0, 1, 1), (0, 5, 1, 1)]),
    ("iou", "gold_space", ["seen"]),
    ("iou", "layout", ["xxyy"]),
    ("iou", "space", ["original"]),
    ("iou", "threshold", [0, 1.5]),
    ("json_schema", "schema", [{"type": "obj"}, "{type: object}", {"type": {1}}]),
    ("length", "max_length", [-1, None]),
    ("length", "min_length", [-1, 11]),
    ("length", "unit", ["words"]),
    ("math", "answer", ["<answer></answer>", "\\boxed{}", f"\\boxed{{{'1' * 501}}}"]),
    ("numeric", "answer", ["red", "3 or 4", "\\sqrt{2}", "2x + 1", "1e999", "three quarters", "3 dozen", "5²"]),
    ("numeric", "tolerance", [-1, math.inf]),
    ("repetition_penalty", "max_penalty", [0.5]),
    ("repetition_penalty", "ngram", [0]),
    ("repetition_penalty", "unit", ["lines"]),
    ("soft_overlong", "buffer", [0, 11]),
    ("temporal_iou", "interval", [[5], 5, [5, 5], [10, 5], [-1, 5], [5, math.nan], [5, math.inf], [True, 5],
                                  [5, 10**400], [[1, 2], [5, 10]], [1, 2, 3], "5 to 10", "[" * 100_000, []]),
    ("temporal_iou", "gold_space", ["frames", "normalized"]),
    ("temporal_iou", "space", ["pixel", "normalized"]),
]  # fmt: skip


def call(name: str, completion: str, **changed: Any) -> float | None:
    score = get(name).fn(completion, **{**ARGUMENTS[name], **changed})
    assert score is None or isinstance(score, float)
    return score


def test_every_built_in_is_registered() -> None:
    assert set(BUILTINS) <= set(names())
    assert {name: get(name).fn.__module__ for name in BUILTINS} == BUILTINS
    assert {*ARGUMENTS, "judge", "reward_model"} == set(BUILTINS)


@pytest.mark.lowest
@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"{builtins.__name__}.{module}"))
    assert found.failed == 0


@pytest.mark.parametrize("name", sorted(name for name in BUILTINS if get(name).needs))
def test_a_row_without_gold_gives_none(name: str) -> None:
    (column,) = get(name).needs
    assert call(name, "<answer>[0, 0, 1, 1]</answer>", **{column: None}) is None
    if column == "answer" and name != "edit_similarity":  # there an empty text is an empty page
        for blank in ("", " \n") if name == "choice" else ("", " \n", [], [None, ""]):
            assert call(name, "3", answer=blank) is None


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, value) for name, option, values in REFUSED for value in values],
)
def test_a_value_that_means_nothing_is_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match="gold" if option in get(name).needs else option):
        call(name, "[0, 0, 1, 1]", **{option: value})


GARBAGE = ["", " ", "\x00", "\ud800", "é猫", "nan", "inf", "-inf", "1e999", "9" * 400, "None", "{}", "[]", "[[]]",
           "<answer></answer>", "<answer>", "\\boxed{}", "[NaN, 0, 1, 1]", "[0, 0, 1e400, 1]", "[1e308, 0, 1, 1]",
           "[5, 5, 1, 1]", "[-1e6, -1e6, 1e6, 1e6]", "[0, 0, 0, 0]", "[" + "9" * 5000 + "]"]  # fmt: skip


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_any_text_scores_within_the_range(name: str) -> None:
    low, high = RANGES.get(name, (0, 1))

    @settings(max_examples=settings().max_examples // 5)  # of each reward
    @given(st.text() | st.lists(st.floats() | st.text(max_size=3)).map(str))
    def check(text: str) -> None:
        for whole in (text, f"<answer>{text}</answer>", f"<think>{text}</think>{text}"):
            score = call(name, whole)
            assert score is not None and low <= score <= high and math.isfinite(score), whole

    for text in GARBAGE:
        check = example(text)(check)
    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARGUMENTS.keys() - {"count", "giou"}))  # those read as others
def test_huge_texts_are_scored_fast(name: str) -> None:
    slowest: tuple[float, str] = (0.0, "")
    for piece in PIECES:
        text = (piece * (HUGE // len(piece) + 1))[:HUGE]
        start = time.thread_time()
        call(name, text if len(piece) > 1 else f"<answer>{text}</answer>")
        slowest = max(slowest, (time.thread_time() - start, piece))
    # 0.1 s at most, of imports too; what grows with the square of the text would take 4
    assert slowest[0] < 2.0, slowest


def test_a_missing_library_is_an_error_when_the_reward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "math"
    module, package, extra = builtins.LIBRARIES[name]
    monkeypatch.setitem(builtins.LIBRARIES, name, (f"no_{module}", package, extra))
    builtins.library.cache_clear()
    message = rf"reward '{name}' needs the package {package}, .* pip install 'mm_grpo\[{extra}\]'"
    with pytest.raises(RewardError, match=message):
        resolve_entry(name)
    with pytest.raises(RewardError, match=message):
        builtins.library(name)
    builtins.library.cache_clear()
