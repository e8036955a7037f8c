"""Where the final answer stands, gold answers from a column, and normal forms of texts."""

import pytest

from mm_grpo.rewards.builtins.answers import boxed, final_part, gold_texts, normalise

FOUND = {
    final_part: {
        "<answer>a</answer><answer>b</answer> tail": "b",
        "<answer>cut off": "cut off",
        "<think>4</think>\n3": "\n3",
        "<think>a</think> b </think> c": " c",
        "<think>never closed": "<think>never closed",
        "<think><answer>a</answer></think> b": "a",
    },
    boxed: {
        r"\boxed{1} and \boxed{2}": "2",
        r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
        r"\boxed{1} and \boxed{2": "1",
        r"\boxed{\boxed{3}}": "3",
        "boxed{3}": None,
    },
    normalise: {
        "  The\n cat. ": "the cat",
        "“Cat.”": "cat",
        "`a_b`": "a_b",
        "-5": "-5",
        "C++": "c++",
        "...": "...",
        "Stra\u00dfe": "strasse",
        "cafe\u0301": "caf\u00e9",
        "猫。": "猫",
    },
}


@pytest.mark.parametrize(
    ("fn", "text", "found"),
    [(fn, text, found) for fn, table in FOUND.items() for text, found in table.items()],
)
def test_parts_and_normal_forms(fn, text, found):
    assert fn(text) == found


def test_gold_answers_of_a_column():
    assert gold_texts(3.0) == ["3"] and gold_texts(2.5) == ["2.5"] and gold_texts(None) == []
    assert gold_texts(["a", None, " ", 3]) == ["a", "3"]
