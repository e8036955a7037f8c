import doctest
import importlib
import time

import pytest

from mm_grpo.rewards import get
from mm_grpo.rewards.builtins import answers, choice, exact_match, format, length
from mm_grpo.rewards.builtins.answers import boxed, final_part, normalise

HUGE = 100_000


@pytest.mark.parametrize("module", [answers, choice, exact_match, format, length])
def test_the_examples_in_the_docstrings_run(module):
    # `from builtins import choice` finds the module: the package's names are those of its files.
    found = doctest.testmod(importlib.import_module(module.__name__))
    assert found.failed == 0 and found.attempted > 0


@pytest.mark.parametrize(
    "text, part",
    [
        ("plain", "plain"),
        ("", ""),
        ("<answer>a</answer><answer>b</answer> tail", "b"),
        ("<ANSWER>a</Answer>", "a"),
        ("<answer>cut off", "cut off"),
        ("<think>4</think>\n3", "\n3"),
        ("<think>a</think> b </think> c", " c"),
        ("<think>never closed", "<think>never closed"),
        ("<think><answer>a</answer></think> b", "a"),
    ],
)
def test_the_final_part(text, part):
    assert final_part(text) == part


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_the_box(text, inside):
    assert boxed(text) == inside


@pytest.mark.parametrize(
    "text, same",
    [
        ("  The\n cat. ", "the cat"),
        ("**Cat**", "cat"),
        ("“Cat.”", "cat"),
        ("`a_b`", "a_b"),
        ("-5", "-5"),
        (".5", ".5"),
        ("50%", "50%"),
        ("(1, 2)", "(1, 2)"),
        ("C++", "c++"),
        ("it's", "it's"),
        ("?", "?"),
        ("...", "..."),
        ("", ""),
        ("Stra\u00dfe", "strasse"),
        ("cafe\u0301", "caf\u00e9"),
        ("x\u00b2", "x\u00b2"),
        ("猫。", "猫"),
    ],
)
def test_normal_forms(text, same):
    assert normalise(text) == same


@pytest.mark.parametrize(
    "piece",
    [
        "(",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "\\boxed{",
        "{",
        "}",
        "*",
        "**",
        '"',
        " ",
        "\n",
        "A",
        "A,",
        "A or ",
        "A) \n",
        "answer ",
        "Answer: ",
        "Answer: A, ",
        "the answer is ",
        "option ",
        "A is ",
        ".",
        "é",
        "\u0301",
        "<think>x</think> ",
        "<think>x</think> <answer>",
    ],
)
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("exact_match", {"answer": "B"}),
        ("choice", {"answer": "B"}),
        ("format", {}),
        ("length", {"max_length": 10}),
    ],
)
def test_huge_texts_are_scored_fast(name, arguments, piece):
    text = piece * (HUGE // len(piece))
    start = time.perf_counter()
    assert get(name).fn(text, **arguments) in (0.0, 1.0)
    assert time.perf_counter() - start < 1.0
