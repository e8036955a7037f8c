"""What the built-ins score, worked out by hand: of each reward, its options, and completion, gold value and score."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mm_grpo.rewards import Scorer, get

pytestmark = pytest.mark.lowest

TWO = [[0, 0, 10, 10], [20, 0, 30, 10]]
TRIANGLE = [[0, 0], [40, 0], [0, 40]]
MANY = [[i, 0, i + 1, 1] for i in range(120)]
HORSESHOE = [0, 0, 30, 0, 30, 30, 20, 30, 20, 10, 10, 10, 10, 30, 0, 30]
RECEIPT = {
    "type": "object",
    "properties": {"total": {"type": "number"}, "items": {"type": "array", "items": {"type": "string"}}},
    "required": ["total"],
    "additionalProperties": False,
}
UNIQUE = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "array", "uniqueItems": True}
OBJECTS = json.dumps([{"a": [n]} for n in range(9_000)])
AFTER_THINK = {"template": "...</think> <answer>...</answer>"}
DAPO = {"max_length": 20480, "buffer": 4096}

CASES: list[tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = [
    # text
    ("exact_match", {}, [
        ("3.", 3, 1), ("Three", "three", 1), ("<answer>$\\boxed{3}$</answer>", "<answer>3</answer>", 1),
        ("3", "\\boxed{3}", 1), ("", "3", 0), ("-5", "−5", 1), ("\\boxed{\\text{cat}}", "cat", 1),
        ("nan", float("nan"), None), ("dog", ["cat", "dog"], 1), ("anything", None, None)]),
    ("exact_match", {"ignore_case": False}, [("Cat", "cat", 0)]),
    ("choice", {}, [("Answer: B", gold, 1) for gold in
                    ("b", "(B)", " B. ", "B. a dog", "<answer>B</answer>", "\\boxed{B}")]),
    ("choice", {"letters": "ABCDEFGHI"}, [("Answer: I", "I", 1)]),
    ("contains", {}, [
        ("A tabby cat.", "tabby cat", 1), ("concatenate", "cat", 0), ("C++ code", "C++", 1),
        ("the number 123", "12", 0), ("<think>a cat</think> a dog", "cat", 0), ("是一只猫。", "猫", 0),
        (".*", ".*", 1), ("dog", ["cat", "dog", None], 1), ("dog", None, None)]),
    ("contains", {}, [
        ("5.5", "5", 0), ("5,000", "5", 0), ("1.5", "5", 0), ("5.", "5", 1), ("1,2,3", "2", 1), ("1.cat", "cat", 1),
    ]),
    ("contains", {"whole_words": False}, [("是一只猫。", "猫", 1)]),
    ("contains", {"mode": "all"}, [("red, blue", ["red", "blue", "green"], 0), ("red, blue", ["red", "blue"], 1)]),
    ("anls", {}, [
        ("  BOEING\n", "boeing", 1), ("boeng", "boeing", 5 / 6), ("boei", "boeing", 4 / 6),
        ("boe", "boeing", 0),  # 3 edits of 6 are not below a half
        ("<answer>boeing</answer> 747", "boeing", 1), ("the boeing company", "boeing", 0),
        ("12.5%", "12.5 %", 5 / 6), ("dog", None, None)]),
    ("edit_similarity", {}, [
        ("kitten", "sitting", 4 / 7), ("a  b\nc", "a b c", 1), ("ABC", "abc", 0), ("abc", "", 0), ("", "", 1)]),
    # numbers
    ("numeric", {}, [
        ("<think>4</think> three", 3, 1), ("\\boxed{3} is not 4", 3, 1), ("\\boxed{\\frac{\\pi}{2}}", 2, 0),
        ("50%", 0.5, 1), ("50%", 50, 1), ("three or four", 4, 1), ("0.5", "50%", 1), ("0.5%", "50%", 0),
        ("3", float("nan"), None), ("7", [3, "7"], 1), ("5 m", "5 cm", 1), ("7", None, None)]),
    ("numeric", {"tolerance": 0.02}, [("3.3", "10/3", 1)]),
    ("numeric", {"tolerance": 0.01}, [("3.2", "10/3", 0)]),
    ("numeric", {"tolerance": 0.05}, [("-105", -100, 1)]),
    ("count", {}, [
        ("3", "three", 1), ("3.0", 3, 1), ("-3", 3, 0), ("1,024 dots", 1024, 1),
        ("I see 2 dogs, one of them black", 2, 1), ("None.", 0, 1), ("twenty-one", 21, 1), ("3", None, None),
        ("3", "1 + 2 = 3\n#### 3", 1), ("3", "3 cats", 1), ("3", [float("nan")], None)]),
    ("chart_relaxed", {}, [
        ("105", 100, 1), ("0", 0, 1), ("12%", "0.12", 1), ("The answer is 100", "100", 0),
        ("<answer>Blue.</answer>", "blue", 1), ("", "blue", 0), ("1_00", "100", 0), ("-5", "−5", 1),
        ("x", None, None)]),
    ("chart_relaxed", {"exact_years": True}, [
        ("2010", "2015", 0), ("2015.0", "2015", 1), ("2010.4", "2010.5", 1), ("101", "100", 1)]),
    ("math", {}, [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1), ("<answer>2\\sqrt{2}</answer>", "\\sqrt{8}", 1), ("2\\sqrt{2}", "2", 0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1), ("\\boxed{(x+1)^2}", "x^2+2x+2", 0), ("\\boxed{(1,2)}", "(1, 2)", 1),
        ("\\boxed{(2,1)}", "(1, 2)", 0), ("\\boxed{x=5}", "5", 1), ("so it is 7.", 7, 1), ("\\boxed{B}", "B", 1),
        ("", 1, 0), ("2", None, None),
        ("\\boxed{\\text{Monday}}", "\\text{Monday}", 1), ("\\boxed{\\text{Friday}}", "\\text{Monday}", 0),
        *((f"\\boxed{{{answer}}}", gold, score) for gold, *answers in (
            ("2√3", "2\\sqrt{3}", "2"), ("5√{2} cm", "5\\sqrt2", "5"), ("√2/2", "\\frac{\\sqrt{2}}{2}", "2"),
            ("∛8", "2", "8"), ("3½", "3.5", "3"), ("1 1/2", "1.5", "1"), ("10⁻³", "0.001", "10"),
            ("x²+1", "x^2+1", "x+1"), ("1.2e3", "1200", "1.2"), ("5×10^-3", "0.005", "5"), ("–3", "-3", "3"),
            ("∞", "\\infty", "3"), ("12 cm^2", "12", "2"), ("60 km/h", "60\\,\\text{km/h}", "6"), ("5 cats", "5", 4),
            ("100 J", "100", "10"), ("5 million", "5 million", "5"), ("30 percent", "30\\%", "3"),
            ("≈ 3.5", "3.5", "35"), ("$12 cm^2$", "12", "2")) for answer, score in zip(answers, (1, 0), strict=True)),
        ("The area is 5\\sqrt{3} cm^2.", "5√3", 1), ("The area is 5√3.", "5", 0), ("It is 5√3, so 7.", "7", 1),
        ("Yes", "yes", 1), ("No.", "Yes", 0), ("三", "三", 1),
        *((text, "B", 1) for text in ("(B)", "The answer is B.", "\\boxed{B. 45°}", "<answer>B) 45</answer>")),
        ("The answer is A", "B", 0), ("\\boxed{B}", "B. 45°", 1), ("\\boxed{45°}", "B. 45°", 1), ("A", "B. 45°", 0)]),
    # vision
    ("iou", {}, [
        ("[0, 0, 10, 20]", (0, 0, 10, 20), 1), ("[0, 0, 10, 10]", (0, 0, 10, 20), 0.5),
        ("[5, 0, 15, 20]", (0, 0, 10, 20), 1 / 3), ("[10, 0, 20, 20]", (0, 0, 10, 20), 0),
        ("[10, 0, 0, 20]", (0, 0, 10, 20), 0), ("[0, 0, 10, 20] no, [0, 0, 10, 10]", (0, 0, 10, 20), 0.5),
        ("nowhere", (0, 0, 10, 20), 0)]),
    ("iou", {"threshold": 0.5}, [("[0, 0, 10, 10]", (0, 0, 10, 20), 1), ("[5, 0, 15, 20]", (0, 0, 10, 20), 0)]),
    ("iou", {"layout": "xywh"}, [("[1, 2, 30, 40]", (1, 2, 31, 42), 1)]),
    ("iou", {"gold_layout": "xywh"}, [("[1, 2, 31, 42]", [1, 2, 30, 40], 1)]),
    ("iou", {"layout": "yxyx"}, [("[2, 1, 42, 31]", gold, 1) for gold in (
        "[1, 2, 31, 42]", "1, 2, 31, 42", "<|box_start|>(1,2),(31,42)<|box_end|>", '[{"bbox_2d": [1, 2, 31, 42]}]')]),
    ("giou", {}, [
        ("[0, 0, 10, 20]", (0, 0, 10, 20), 1), ("[0, 0, 10, 10]", (0, 0, 10, 20), 0.5),
        ("[10, 0, 20, 20]", (0, 0, 10, 20), 0),  # side by side: the hull is the union
        ("[30, 0, 40, 20]", (0, 0, 10, 20), -0.5),  # union 400 of a hull of 800
        ("[10, 20, 20, 40]", (0, 0, 10, 20), -0.5), ("[10, 0, 0, 20]", (0, 0, 10, 20), -1),
        ("nowhere", (0, 0, 10, 20), -1)]),
    ("box_match", {}, [
        ("[20,0,30,10] [0,0,10,10]", TWO, 1), ("[0,0,10,10]", TWO, 2 / 3), ("[0,0,10,10] [0,0,10,10]", TWO, 0.5),
        ("[0,0,10,10] [20,0,30,10] [50,0,60,10]", TWO, 0.8), ("[0,0,10,5] [20,0,30,4]", TWO, 0.5), ("", TWO, 0),
        ("there are none", [], 1), ("[0,0,10,10]", [], 0),
        ("[0,0,10,10] " * 100, TWO[:1], 2 / 101), ("[0,0,10,10] " * 101, TWO[:1], 0),  # too many win nothing
        (" ".join(map(str, MANY)), MANY, 1),
        *(("[0,0,10,10]", gold, score) for gold, score in (
            ("[0,0,10,10]", 1), ([0, 0, 10, 10], 1), (json.dumps(TWO), 2 / 3), ("[]", 0)))]),
    ("clicking", {}, [
        *((text, (10, 10, 20, 20), score) for text, score in (
            ("(15, 15)", 1), ("(20, 10)", 1), ("(9.9, 15)", 0), ("(15, 20.01)", 0), ("(1, 1) or (15, 15)", 1),
            ("[10, 10, 20, 20]", 1), ("(-15, 15)", 0), ("15", 0))),
        ("(5, 5)", TRIANGLE, 1), ("(21, 20)", TRIANGLE, 0), ("(39, 39)", TRIANGLE, 0),  # in the box around it
        ("(25, 20)", HORSESHOE, 1), ("(15, 20)", HORSESHOE, 0),
        ("(25, 20)", "[[0, 0, 5, 0, 5, 5], [20, 15, 30, 15, 30, 25]]", 1)]),  # any of several
    ("clicking", {"layout": "xywh", "gold_layout": "xywh"}, [("[1, 1, 2, 2]", [0, 0, 2, 2], 1)]),
    ("temporal_iou", {}, [
        ("[4, 8]", [4, 8], 1), ("[4, 8]", [6, 10], 1 / 3), ("[0, 4]", [4, 8], 0), ("[0, 9]", [4, 8], 4 / 9),
        ("8 to 4", [4, 8], 0), ("4 to 4", [4, 8], 0), ("[4, 8]", "[[6.0, 10.0]]", 1 / 3), ("[4, 8]", None, None),
        ("<answer>[4, 8]</answer> not 6 to 10", [6, 10], 1 / 3), ("[6, 10] or [4, 8]", [4, 8], 0),
        ("[4, 8], that is 0:04 - 0:08", [4, 8], 1), ("0:59:58 - 1:00:02", [3600, 3602], 0.5)]),
    ("temporal_iou", {"space": "normalized", "gold_space": "normalized"}, [
        ("0.25 to 0.75", [0.25, 0.5], 0.5), ("0.25 s to 0.75 s", [0.25, 0.5], 0), ("[0.25, 1]", [0, 1], 0.75)]),
    # documents
    ("json_schema", {"schema": RECEIPT}, [
        ('{"total": 12.5}', 1), ('```json\n{"total": 1}\n```', 1), ('{"total": 1, "tip": 2}', 0), ("[]", 0),
        ('<think>{}</think> <answer>\n```\n{"total": 1}\n```\n</answer>', 1), ('{"total": 1e400}', 1),
        ('so {"total": 1}', 0), ("{'total': 1}", 0), ("", 0)]),
    ("json_schema", {"schema": json.dumps(RECEIPT)}, [('{"total": 12.5}', 1), ('{"total": 1, "tip": 2}', 0)]),
    ("json_schema", {}, [
        ("3", 1), ("[]", 1), ('"a"', 1), ("null", 1), ("", 0), ("[1,]", 0), ("[" * 100_000, 0)]),
    ("json_schema", {"schema": UNIQUE}, [
        ("[1, true, [1], [true], 0, null, {}]", 1), ("[1, 1.0]", 0), ('[{"a": 1, "b": []}, {"b": [], "a": 1.0}]', 0),
        (OBJECTS, 1), (OBJECTS[:-1] + ', {"a": [7]}]', 0)]),
    ("json_schema", {"schema": {"type": "array", "items": {"$ref": "#"}}}, [("[" * 50 + "]" * 50, 1)]),
    ("json_schema", {"schema": {"properties": {"total": {"multipleOf": 0.5}}}}, [('{"total": ' + "9" * 400 + "}", 0)]),
    # shape
    ("format", {}, [
        ("<think>a</think><answer>b</answer>", 1), ("<think>a < b > c</think> <answer>b</answer>", 1), ("", 0),
        ("<think>a</think>", 0), ("<answer>b</answer>", 0), ("<think>a</think> <answer></answer>", 0),
        ("<think>a</think> <answer>b <answer>c</answer>", 0), ("so <think>a</think> <answer>b</answer>", 0),
        ("<think>a</think> <answer>b</answer> so", 0)]),
    ("format", AFTER_THINK, [("a</think> <answer>b</answer>", 1), ("<think>a</think> <answer>b</answer>", 1)]),
    ("format", {"template": "The answer is ..."}, [("The answer is this.", 1), ("The answer is ", 0)]),
    ("format", {"template": "...so"}, [("I think so", 1)]),
    ("format", {"pattern": "a.b"}, [("a\nb", 1), ("a\nbc", 0)]),
    ("length", {"min_length": 10, "max_length": 20}, [("é" * size, score) for size, score in (
        (0, 0), (5, 0.5), (9, 0.9), (10, 1), (20, 1), (21, 0.95), (30, 0.5), (40, 0), (100_000, 0))]),
    ("length", {"max_length": 0}, [("x", 0)]),
    ("length", {"completion_ids": [1, 2, 3], "max_length": 2, "unit": "tokens"}, [("x" * 99, 0.5)]),
    ("length", {"completion_ids": (), "min_length": 2, "unit": "tokens"}, [("x" * 99, 0)]),
    *(("soft_overlong", {"completion_ids": range(tokens), **DAPO}, [("", score)]) for tokens, score in (
        (0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1))),
    ("repetition_penalty", {}, [("", 0), ("a b", 0), ("a b c d", 0), ("A a a A", -0.5)]),
    ("repetition_penalty", {"ngram": 1}, [("a a a a", -0.75)]),
    ("repetition_penalty", {"max_penalty": -2.0}, [("a a a a", -1)]),
    ("repetition_penalty", {"unit": "characters", "ngram": 2}, [("哈哈哈哈哈", -0.75)]),
    ("repetition_penalty", {"completion_ids": [5, 6, 5, 6, 5, 6], "ngram": 2, "unit": "tokens"}, [("", -0.6)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "case"), [(name, how, case) for name, how, cases in CASES for case in cases]
)
def test_scores_by_hand(name: str, options: dict[str, Any], case: tuple[Any, ...]) -> None:
    completion, *gold, score = case
    found = get(name).fn(completion, **dict(zip(get(name).needs, gold, strict=True)), **options)
    assert found == (None if score is None else pytest.approx(score, abs=1e-12))


def test_a_json_schema_that_nests_deep_or_points_elsewhere() -> None:
    score = get("json_schema").fn
    assert score("[" * 900 + "]" * 900, {"type": "array", "items": {"$ref": "#"}}) in (0.0, 1.0)
    with pytest.raises(Exception, match=r"http://127.0.0.1:9/never"):  # nothing is fetched
        score("{}", {"$ref": "http://127.0.0.1:9/never"})


def test_the_built_ins_score_rows(rows: Any) -> None:
    entries = ["choice", {"name": "format", "weight": 0.5, "template": "<answer>...</answer>"},
               {"name": "length", "weight": 0.25, "max_length": 2, "unit": "tokens"},
               {"name": "soft_overlong", "weight": 0, "max_length": 4, "buffer": 2}]  # fmt: skip
    scores = Scorer(entries).score(*rows(["<answer>B</answer>", "B", "abc"], answer=["B", "B", None]), step=1)
    assert scores.parts == {
        "choice": [1.0, 1.0, None],
        "format": [1.0, 0.0, 0.0],
        "length": [0.0, 1.0, 0.5],
        "soft_overlong": [-1.0, 0.0, -0.5],
    }
    assert scores.totals == [1.5, 1.25, 0.125]
    with pytest.raises(Exception, match="reward 'soft_overlong' asks for 'max_length'"):
        Scorer(["soft_overlong"]).score(*rows(["a"]), step=1)
