"""json_schema and table_f1, and how tables are read."""

import json
import time

import pytest

from mm_grpo.rewards.builtins.documents import json_schema, read_table, table_f1

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
        ('```json\n{"total": 1}\n```', 1.0),
        ('<think>{}</think> <answer>\n```\n{"total": 1}\n```\n</answer>', 1.0),
        ('{"total": 1, "tip": 2}', 0.0),
        ("[]", 0.0),
        ('{"total": 1e400}', 1.0),
        ('so {"total": 1}', 0.0),
        ("{'total': 1}", 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(completion, score):
    assert json_schema(completion, RECEIPT) == score
    assert json_schema(completion, json.dumps(RECEIPT)) == score


def test_json_schema_without_a_schema_or_with_one_that_recurses():
    texts = ("3", "[]", '"a"', "null", "", "[1,]", "[" * 100_000)
    assert [json_schema(text) for text in texts] == [1, 1, 1, 1, 0, 0, 0]
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema("[" * 50 + "]" * 50, nested) == 1.0
    assert json_schema("[" * 900 + "]" * 900, nested) in (0.0, 1.0)

    with pytest.raises(Exception, match=r"http://127.0.0.1:9/never"):  # nothing is fetched
        json_schema("{}", {"$ref": "http://127.0.0.1:9/never"})


BRANCHES = [{"maxItems": 0}, {"minItems": 9}, {}]
TREE = {"anyOf": [{"items": {"$ref": "#"}, **limit} for limit in BRANCHES]}  # every level tries three


@pytest.mark.parametrize(
    ("completion", "schema", "score"),
    [
        (json.dumps([{"k": i} for i in range(9000)]), {"uniqueItems": True}, 1.0),
        (json.dumps([{"k": i % 8999} for i in range(9000)]), {"uniqueItems": True}, 0.0),
        ("[" * 40 + "]" * 40, TREE, 0.0),
        (json.dumps(["a"] * 40_000), {"items": {"anyOf": [{"type": "null"}, {"type": "string"}]}}, 0.0),
        (json.dumps(["a"] * 9_000), {"items": {"anyOf": [{"type": "null"}, {"type": "string"}]}}, 1.0),
        ("```\n" + " " * 100_000, {}, 0.0),
        ('{"total": ' + "9" * 400 + "}", {"properties": {"total": {"multipleOf": 0.5}}}, 0.0),
    ],
    ids=range(7),  # the texts are long
)
def test_json_schema_is_bounded(completion, schema, score):
    start = time.thread_time()
    assert json_schema(completion, schema) == score
    assert time.thread_time() - start < 15  # 0.5 s at most; without bounds, minutes


def test_unique_items_are_equal_as_json_says():
    for text, score in (("[1, true]", 1.0), ("[[1], [1.0]]", 0.0), ('[{"a": 0}, {"a": false}]', 1.0)):
        assert json_schema(text, {"uniqueItems": True}) == score
        assert json_schema(text, {"uniqueItems": False}) == 1.0


# table_f1 --------------------------------------------------------------------------------------


GOLD = "| | 2020 | 2021 |\n|---|---|---|\n| Oslo | 1 | 2 |\n| Rome | 3 | 4 |"
ROWS = [["", "2020", "2021"], ["Oslo", "1", "2"], ["Rome", "3", "4"]]


@pytest.mark.parametrize(
    "text",
    [
        GOLD,
        "Here it is:\n\n" + GOLD + "\n\nDone | so",
        GOLD.replace("|---|---|---|", "|:--|:-:|--:|"),
        "city | 2020 | 2021\n-|-|-\nOslo | 1 | 2\nRome | 3 | 4",
        ",2020,2021\nOslo,1,2\nRome,3,4",
        "\t2020\t2021\nOslo\t1\t2\nRome\t3\t4",
        "```csv\n,2020,2021\nOslo,1,2\nRome,3,4\n```",
        "<table><tr><th></th><th>2020</th><th>2021</th></tr><tr><td>Oslo</td><td>1</td><td>2</td></tr>"
        "<tr><td>Rome</td><td>3</td><td>4</td></tr></table> tail <table><tr><td>other</td></tr></table>",
        "<TABLE><tr><th><th>2020<th>2021<tr><td>Oslo<td>1<td> 2 <tr><td>Rome<td>3<td><b>4</b>",
    ],
)
def test_tables_in_many_forms(text):
    head, *rest = read_table(text)
    assert head[0] in ("", "city") and [head[1:], *rest] == [ROWS[0][1:], *ROWS[1:]]


def test_spans_in_html():
    html = "<table><tr><td rowspan=2>a<td colspan=2>b<tr><td>c<td>d<tr><td>e</table>"
    assert read_table(html) == [["a", "b", "b"], ["a", "c", "d"], ["e"]]
    middle = "<table><tr><td>a<td rowspan=2>b<td>c<tr><td>d<td>e</table>"
    assert read_table(middle) == [["a", "b", "c"], ["d", "b", "e"]]
    wild = '<table><tr><td rowspan="-1" colspan="x">a<td colspan="99999999999">b</table>'
    assert read_table(wild) == [["a"] + ["b"] * 100]
    assert read_table("<table></table>") == [] and read_table("no table") == [] and read_table("") == []


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (GOLD, 1.0),
        (",2021,2020\nRome,4.0,3\noslo,2,1", 1.0),  # rows and columns in another order
        (",2020,2021\nOslo,1,2\nRome,3,5", 0.75),
        (",2020,2021\nOslo,1,2", 2 / 3),
        (",2020,2021\nOslo,1,2\nRome,3,4\nBonn,5,6", 0.8),
        (",2020\nOslo,1\nRome,3", 2 / 3),
        (",2020,2021\nOslo,1,1\nOslo,1,1\nOslo,1,1", 0.2),  # one cell, said three times
        ("year,value\n2020,1", 0.0),
        ("|||\n|-|-|\n", 0.0),
    ],
)
def test_table_f1(completion, score):
    assert table_f1(completion, GOLD) == pytest.approx(score)


def test_table_f1_by_position():
    assert table_f1(",2021,2020\nOslo,2,1\nRome,4,3", GOLD, align="position") == pytest.approx(3 / 9)
    assert table_f1("a,b,c", "a,b,d") == pytest.approx(2 / 3)  # one row has no names
    assert table_f1("<table><tr><td>a<tr><td>b</table>", "<table><tr><td>a<tr><td>c</table>") == 0.5
    assert table_f1(GOLD, GOLD, align="position") == 1.0
    assert table_f1("a,b\nx,1\nx,1", "a,b\nx,1\nx,1") == 1.0  # a cell twice on both sides


def test_what_html_may_hold_besides_cells():
    cells = "<td title=x>1 &lt; 2<td>a<br>b<td>&#65;&#9999999999;<td>3 < 4"
    html = f"<!DOCTYPE html><table><!-- <td>no --><tr>{cells}</table>"
    assert read_table(html) == [["1 < 2", "a b", "A", "3 < 4"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["<td ", "<!--", "</", "<td a='", "&#9", "<tr><td>", "<td>a\u0301\u0323", "|-|\n"]
)
def test_tables_are_read_in_linear_time(piece):
    start = time.thread_time()
    assert table_f1("<table><td>x" + piece * (200_000 // len(piece)), GOLD) == 0.0
    assert time.thread_time() - start < 6  # 0.2 s at most
