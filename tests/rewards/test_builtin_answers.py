"""Where the final answer stands, gold answers from a column, and normal forms of texts."""

import time

import pytest

from mm_grpo.rewards import get
from mm_grpo.rewards.builtins.answers import boxed, final_part, gold_texts, normalise, text_list

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
    text_list: {
        "['tram', 'tram stop']": ("tram", "tram stop"),  # Python
        "['tram' 'tram stop'\n 'bus']": ("tram", "tram stop", "bus"),  # numpy
        '["caf\\u00e9", "\\ud83d\\ude00", 3, null]\n': ("café", "\U0001f600", "3"),  # JSON
        "[\"it's\", 'a \"b\"', 'c\\'d', '\\\\frac{1}{2}']": ("it's", 'a "b"', "c'd", "\\frac{1}{2}"),
        "('a', 'b')": ("a", "b"),
        "array(['a)', 'b'], dtype=object)": ("a)", "b"),
        "np.array(['a' 'b'],\n      dtype='<U3')": ("a", "b"),
        "array([1, 2])": (),
        "array('a')": (),
        "{'a', '[1]'}": ("a", "[1]"),
        "('a')": (),  # parentheses alone
        "[0, 1]": (),
        "[0, 1)": (),
        "[]": (),
        "{'a': 'b'}": (),
        "['a', ['b']]": (),
        "['a'] or ['b']": (),
        "[a, b]": (),
        "'a'": (),
        "['a'}": (),
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
    assert gold_texts(["a", None, " ", 3, float("nan")]) == ["a", "3"]
    for wrong in ({"text": ["a"]}, [{"answer": "a"}], b"a"):
        with pytest.raises(TypeError, match="gold"):
            gold_texts(wrong)


LISTED, NUMBERS = "['tram', 'tram stop']", '["3", "5"]'


@pytest.mark.parametrize(
    ("name", "completion", "answer", "score"),
    [
        *((name, "tram", LISTED, 1.0) for name in ("exact_match", "contains", "anls", "chart_relaxed")),
        *((name, LISTED, LISTED, 1.0) for name in ("exact_match", "contains", "anls", "chart_relaxed")),
        *((name, "5", NUMBERS, 1.0) for name in ("numeric", "count", "math", "chart_relaxed")),
        ("exact_match", "tram", [LISTED], 0.0),
        ("exact_match", "tram", "[u'cow', u\"tram\"]", 1.0),
        ("exact_match", "ｄｏｎ’ｔ", "don't", 1.0),
        ("edit_similarity", LISTED, LISTED, 1.0),
    ],
)
@pytest.mark.field_bug("gold-lists")
def test_a_list_as_text_is_many_answers(name: str, completion: str, answer: object, score: float) -> None:
    assert get(name).fn(completion, answer=answer) == score


@pytest.mark.parametrize(
    "text",
    [
        "['a'" * 3000 + "]",
        "[" + " " * 15000 + "x]",
        "['" + "\\" * 19000 + "]",
        "[" * 9999 + "]",
        "array(" + ", " * 9000 + ")",
    ],
)
def test_a_long_text_is_no_list_and_takes_no_time(text: str) -> None:
    started = time.process_time()
    assert text_list(text) == ()
    assert time.process_time() - started < 1
