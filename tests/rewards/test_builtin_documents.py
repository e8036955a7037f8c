import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards.builtins.anls import anls
from mm_grpo.rewards.builtins.chart_relaxed import chart_relaxed
from mm_grpo.rewards.builtins.edit_similarity import edit_similarity
from mm_grpo.rewards.builtins.table_f1 import table_f1
from mm_grpo.rewards.builtins.tables import read_table


def edits(one, other) -> int:
    """The Levenshtein distance by its definition."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def reference_anls(given: str, golds: list[str], threshold: float) -> float:
    """ANLS as its paper states it."""
    best = 0.0
    for gold in golds:
        given_, gold_ = (" ".join(text.lower().split()) for text in (given, gold))
        share = edits(given_, gold_) / max(len(given_), len(gold_), 1)
        best = max(best, 1 - share if share < threshold else 0.0)
    return best


# anls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("boeing", "Boeing", 1.0),
        ("  BOEING\n", "boeing", 1.0),
        ("boeng", "boeing", 5 / 6),
        ("boe", "boeing", 0.0),  # 3 edits of 6 are not below a half
        ("boei", "boeing", 4 / 6),
        ("<answer>boeing</answer> 747", "boeing", 1.0),
        ("the boeing company", "boeing", 0.0),
        ("12.5%", "12.5 %", 5 / 6),
        ("", "boeing", 0.0),
        ("猫犬", "猫", 0.0),
        ("猫犬鳥", "猫犬", 2 / 3),
        ("dog", ["cat", "dog"], 1.0),
        ("dog", [None, "cat"], 0.0),
        ("3", 3, 1.0),
        ("dog", None, None),
    ],
)
def test_anls(completion, answer, score):
    assert anls(completion, answer) == (score if score is None else pytest.approx(score))


words = st.text(alphabet="abAB 1é", max_size=8)


@given(words, st.lists(words.filter(str.strip), min_size=1, max_size=3), st.sampled_from([0.3, 0.5, 1.0]))
def test_anls_is_that_of_the_paper(completion, golds, threshold):
    expected = reference_anls(completion, golds, threshold)
    assert anls(completion, golds, threshold=threshold) == pytest.approx(expected)


def test_anls_has_a_threshold():
    assert anls("boe", "boeing", threshold=0.6) == 0.5
    for threshold in (0, 1.5):
        with pytest.raises(
            ValueError, match=rf"threshold={threshold}; it is a normalised edit distance in \(0, 1\]"
        ):
            anls("a", "a", threshold=threshold)


# edit_similarity -------------------------------------------------------------------------------


@given(st.text(max_size=10), st.text(max_size=10))
def test_edit_similarity_is_symmetric_and_in_its_range(one, other):
    if "<" in one + other:
        return  # tags are read
    value = edit_similarity(one, other)
    assert value is not None and 0 <= value <= 1 and value == edit_similarity(other, one)
    assert edit_similarity(one, one) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "unit", "score"),
    [
        ("kitten", "sitting", "characters", 4 / 7),
        ("abc", "abc", "characters", 1.0),
        ("a  b\nc", "a b c", "characters", 1.0),
        ("ABC", "abc", "characters", 0.0),
        ("", "abc", "characters", 0.0),
        ("abc", "", "characters", 0.0),
        ("", "", "characters", 1.0),
        ("cafe\u0301", "caf\u00e9", "characters", 1.0),
        ("the cat sat", "the cat sat down", "words", 0.75),
        ("a b c d", "d c b a", "words", 0.0),
        ("x", None, "words", None),
    ],
)
def test_edit_similarity(completion, answer, unit, score):
    assert edit_similarity(completion, answer, unit=unit) == (
        score if score is None else pytest.approx(score)
    )


def test_edit_similarity_with_its_options():
    assert edit_similarity("ABC", "abc", ignore_case=True) == 1.0
    with pytest.raises(ValueError, match="unit='lines'; legal are 'characters' and 'words'"):
        edit_similarity("a", "a", unit="lines")  # type: ignore[arg-type]
    start = time.perf_counter()
    assert edit_similarity("ab" * 50_000, "ba" * 5_000) == pytest.approx(0.1, abs=0.001)
    assert time.perf_counter() - start < 2


# chart_relaxed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("100", "100", 1.0),
        ("105", 100, 1.0),
        ("95", 100, 1.0),
        ("105.1", 100, 0.0),
        ("94.9", 100, 0.0),
        ("-100", 100, 0.0),
        ("-102", -100, 1.0),
        ("0", 0, 1.0),
        ("0.01", 0, 0.0),
        ("12%", "0.12", 1.0),
        ("12%", "12", 0.0),
        ("1,050", "1000", 1.0),
        ("$5", "5", 1.0),
        ("2010", "2015", 1.0),
        ("The answer is 100", "100", 0.0),
        ("<answer>Blue.</answer>", "blue", 1.0),
        ("blue", "light blue", 0.0),
        ("", "blue", 0.0),
        ("nan", "nan", 1.0),
        ("inf", "100", 0.0),
        ("1_00", "100", 0.0),
        ("1e999", "100", 0.0),
        ("x", None, None),
        ("Yes", ["No", "yes"], 1.0),
    ],
)
def test_chart_relaxed(completion, answer, score):
    assert chart_relaxed(completion, answer) == score


def test_chart_relaxed_with_its_options():
    assert chart_relaxed("2010", "2015", exact_years=True) == 0.0
    assert chart_relaxed("2015.0", "2015", exact_years=True) == 1.0
    assert chart_relaxed("2010.4", "2010.5", exact_years=True) == 1.0
    assert chart_relaxed("101", "100", tolerance=0) == 0.0
    with pytest.raises(ValueError, match=r"tolerance=5; it is a share of the gold number, in \[0, 1\)"):
        chart_relaxed("1", "1", tolerance=5)


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
        ("nothing", 0.0),
        ("", 0.0),
        ("<table>", 0.0),
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


def test_table_f1_refuses_what_means_nothing():
    assert table_f1(GOLD, None) is None and table_f1(GOLD, " ") is None
    with pytest.raises(
        ValueError, match="the gold text 'words' holds no table in HTML, Markdown, CSV or TSV"
    ):
        table_f1(GOLD, "words")
    with pytest.raises(ValueError, match="align='rows'; legal are 'headers' and 'position'"):
        table_f1(GOLD, GOLD, align="rows")  # type: ignore[arg-type]
