"""json_schema and table_f1, and how tables are read."""

import time

import pytest

from mm_grpo.rewards.builtins.documents import json_schema, read_table, table_f1

# json_schema -----------------------------------------------------------------------------------


def test_json_schema_that_nests_deep_or_points_elsewhere():
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema("[" * 900 + "]" * 900, nested) in (0.0, 1.0)

    with pytest.raises(Exception, match=r"http://127.0.0.1:9/never"):  # nothing is fetched
        json_schema("{}", {"$ref": "http://127.0.0.1:9/never"})


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
