import json

import pytest

from mm_grpo.rewards.builtins.contains import contains
from mm_grpo.rewards.builtins.json_schema import json_schema

# contains --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("A tabby cat.", "tabby cat", 1.0),
        ("A tabby\n  cat", "Tabby Cat", 1.0),
        ("concatenate", "cat", 0.0),
        ("cat's", "cat", 1.0),
        ("C++ code", "C++", 1.0),
        ("the number 12", 12, 1.0),
        ("the number 12", 12.0, 1.0),
        ("the number 123", "12", 0.0),
        ("<think>a cat</think> a dog", "cat", 0.0),
        ("a cat <answer>a dog</answer>", "cat", 0.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("是一只猫。", "猫", 0.0),
        ("", "cat", 0.0),
        ("\x00", "cat", 0.0),
        (".*", ".*", 1.0),
        ("anything", ".*", 0.0),
        ("dog", ["cat", "dog", None], 1.0),
        ("dog", None, None),
        ("dog", [], None),
    ],
)
def test_contains(completion, answer, score):
    assert contains(completion, answer) == score


def test_contains_with_its_options():
    assert contains("是一只猫。", "猫", whole_words=False) == 1.0
    assert contains("Cat", "cat", ignore_case=False) == 0.0
    assert contains("red, blue", ["red", "blue", "green"], mode="share") == pytest.approx(2 / 3)
    assert contains("red, blue", ["red", "blue", "green"], mode="all") == 0.0
    assert contains("red, blue", ["red", "blue"], mode="all") == 1.0
    assert contains("one two three cat", "cat", max_words=3) == 0.0
    assert contains("one two cat", "cat", max_words=3) == 1.0
    with pytest.raises(ValueError, match="mode='most'; legal are 'any', 'all' and 'share'"):
        contains("a", "a", mode="most")  # type: ignore[arg-type]


# json_schema -----------------------------------------------------------------------------------

RECEIPT = {
    "type": "object",
    "properties": {"total": {"type": "number"}, "items": {"type": "array", "items": {"type": "string"}}},
    "required": ["total"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('{"total": 12.5}', 1.0),
        (' {"total": 1, "items": ["é", "猫"]}\n', 1.0),
        ('```json\n{"total": 1}\n```', 1.0),
        ('<think>{}</think> <answer>\n```\n{"total": 1}\n```\n</answer>', 1.0),
        ('{"total": "12"}', 0.0),
        ('{"total": 1, "tip": 2}', 0.0),
        ("{}", 0.0),
        ("[]", 0.0),
        ('{"total": NaN}', 0.0),
        ('{"total": 1e400}', 1.0),
        ('{"total": 1} so', 0.0),
        ('so {"total": 1}', 0.0),
        ('{"total": 1}{"total": 1}', 0.0),
        ("{'total': 1}", 0.0),
        ('{"total": ' + "9" * 5000 + "}", 0.0),
        ("", 0.0),
        ("\x00", 0.0),
    ],
)
def test_json_schema(completion, score):
    assert json_schema(completion, RECEIPT) == score
    assert json_schema(completion, json.dumps(RECEIPT)) == score


def test_without_a_schema_any_json_will_do():
    assert [json_schema(text) for text in ("3", "[]", '"a"', "null", "", "[1,]", "[" * 100_000)] == [
        1,
        1,
        1,
        1,
        0,
        0,
        0,
    ]


def test_deep_json_under_a_schema_that_recurses():
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema("[" * 50 + "]" * 50, nested) == 1.0
    assert json_schema("[" * 900 + "]" * 900, nested) in (0.0, 1.0)


def test_bad_schemas():
    with pytest.raises(ValueError, match="the schema is not a JSON schema: 'obj' is not valid under any"):
        json_schema("{}", {"type": "obj"})
    with pytest.raises(ValueError, match=r"the schema is not JSON \(Expecting"):
        json_schema("{}", "{type: object}")
    with pytest.raises(ValueError, match="the schema cannot be written as JSON"):
        json_schema("{}", {"type": {1}})
    with pytest.raises(Exception, match=r"http://127.0.0.1:9/never"):  # and nothing is fetched
        json_schema("{}", {"$ref": "http://127.0.0.1:9/never"})
