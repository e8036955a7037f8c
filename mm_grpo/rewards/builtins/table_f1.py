"""The reward `table_f1`: how many cells of a table were read rightly."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from mm_grpo.rewards.builtins.answers import final_part, normalise
from mm_grpo.rewards.builtins.tables import read_table
from mm_grpo.rewards.registry import reward

Entry = tuple[str, str, str]


@reward("table_f1", needs=("table",))
def table_f1(
    completion: str, table: str | None, *, align: Literal["headers", "position"] = "headers"
) -> float | None:
    r"""F1 of the cells of the completion's table against the gold table's.

    With align "headers" the first row and column name the others, and a cell is right when its row's
    name, its column's name and its value are right: the order of rows and columns does not matter, as in
    DePlot's RMS (Liu et al., 2022), though names must be equal where RMS allows small edits. A table of
    one row or one column has no such names, and is compared by position. With "position" every cell counts
    at its place. Values are compared as text without case and markup, numbers by value (1,000 = 1000.0).

    Tables are read from the final part (the last `<answer>` block, else what follows `</think>`, else
    everything): HTML, with spans, Markdown, or lines of CSV or TSV, whichever is found first; of several
    tables the first. Text around a Markdown or HTML table is skipped.

    Returns a score in [0, 1], 0.0 when no table is found; None when the row has no gold table.
    ValueError when the gold text holds no table or `align` is another word. For DePlot, PubTabNet, FinTabNet.

    >>> gold = "| year | sales |\n|---|---|\n| 2020 | 1,000 |\n| 2021 | 1,500 |"
    >>> table_f1("year,sales\n2021,1500.0\n2020,1000", table=gold)
    1.0
    >>> table_f1("year,sales\n2020,1000\n2021,1600", table=gold)
    0.5
    """
    if align not in ("headers", "position"):
        raise ValueError(f"align={align!r}; legal are 'headers' and 'position'")
    if table is None or not table.strip():
        return None
    gold = read_table(final_part(table))
    if not gold:
        raise ValueError(f"the gold text {table[:80]!r} holds no table in HTML, Markdown, CSV or TSV")
    given = read_table(final_part(completion))
    if not given:
        return 0.0
    by_name = align == "headers" and len(gold) > 1 and max(len(row) for row in gold) > 1
    right, ours = _entries(gold, by_name), _entries(given, by_name)
    if not ours:
        return 0.0
    return 2 * (right & ours).total() / (right.total() + ours.total())


def _entries(rows: list[list[str]], by_name: bool) -> Counter[Entry]:
    cells = [[_value(cell) for cell in row] for row in rows]
    if not by_name:
        return Counter((str(i), str(j), cell) for i, row in enumerate(cells) for j, cell in enumerate(row))
    head = cells[0]
    return Counter(
        (row[0], head[j] if j < len(head) else "", cell)
        for row in cells[1:]
        for j, cell in enumerate(row)
        if j > 0
    )


def _value(cell: str) -> str:
    text = normalise(cell)
    try:
        return repr(float(text.replace(",", "")))
    except ValueError:
        return text
