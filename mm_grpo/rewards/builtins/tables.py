"""Tables in text, as rows of cells: HTML, Markdown, CSV and TSV.

`read_table` finds the first table of a text. Cells are stripped texts; merged HTML cells are repeated in
every place they cover. Limits keep hostile texts cheap: 200,000 characters are read, 20,000 cells kept.
"""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser

LONGEST = 200_000
MOST_CELLS = 20_000
_MOST_SPAN = 100

Table = list[list[str]]


def read_table(text: str) -> Table:
    """The first table of a text; [] when there is none.

    >>> read_table("Here: | a | b |\\n|---|---|\\n| 1 | 2 |")
    [['a', 'b'], ['1', '2']]
    >>> read_table("<table><tr><td colspan=2>a<tr><td>1<td>2</table>")
    [['a', 'a'], ['1', '2']]
    """
    text = text[:LONGEST]
    if re.search(r"<t(?:able|r|d|h)\b", text, re.IGNORECASE):
        reader = _Html()
        reader.feed(text)
        reader.close()
        reader.end_cell()
        return _kept(
            [[reader.grid[i].get(j, "") for j in range(max(reader.grid[i]) + 1)] for i in sorted(reader.grid)]
        )
    return _kept(_markdown(text) or _separated(text))


def _kept(rows: Table) -> Table:
    kept: Table = []
    cells = 0
    for row in rows:
        cells += len(row)
        if cells > MOST_CELLS:
            break
        if any(row):
            kept.append(row)
    return kept


def _markdown(text: str) -> Table:
    lines = [line.strip() for line in text.splitlines()]
    for at, line in enumerate(lines):
        if at and "-" in line and "|" in line and "|" in lines[at - 1] and not line.strip(" \t|:-"):
            break
    else:
        return []
    rows = [_pipes(lines[at - 1], head=True)]
    for line in lines[at + 1 :]:
        if "|" not in line:
            break
        rows.append(_pipes(line))
    return rows


def _pipes(line: str, head: bool = False) -> list[str]:
    cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)]
    if cells and (not cells[0] or (head and not line.startswith("|") and line.endswith("|"))):
        cells = cells[1:]  # the edge, or the words before the first pipe of "Here: | a | b |"
    return cells[:-1] if cells and not cells[-1] else cells


def _separated(text: str) -> Table:
    lines = [line for line in text.strip(" \r\n").splitlines() if line.strip() and not line.startswith("```")]
    if not lines:
        return []
    separator = max("\t,;|", key=lambda sign: lines[0].count(sign))
    if separator not in lines[0]:
        return []
    try:
        rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    except csv.Error:
        return []
    return [[cell.strip() for cell in row] for row in rows]


class _Html(HTMLParser):
    """Fills `grid[row][column]`; closing tags may be missing, as in HTML."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.grid: dict[int, dict[int, str]] = {}
        self._row, self._column, self._cells = -1, 0, 0
        self._open: tuple[int, int] | None = None
        self._text: list[str] = []
        self._done = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._done:
            return
        if tag in ("tr", "td", "th"):
            self.end_cell()
        if tag == "tr":
            self._row, self._column = self._row + 1, 0
        elif tag in ("td", "th"):
            self._row = max(self._row, 0)
            spans = dict(attrs)
            self._open = (_span(spans.get("rowspan")), _span(spans.get("colspan")))
        elif tag == "br":
            self._text.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "tr", "table"):
            self.end_cell()
        if tag == "table" and self.grid:
            self._done = True

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._text.append(data)

    def end_cell(self) -> None:
        """Write the open cell, if there is one, to every place it covers."""
        if self._open is None:
            return
        (rows, columns), self._open = self._open, None
        text, self._text = " ".join("".join(self._text).split()), []
        self._cells += rows * columns
        if self._cells > MOST_CELLS:
            self._done = True
            return
        row, at = self.grid.setdefault(self._row, {}), self._column
        while at in row:  # a cell above may reach into this row
            at += 1
        self._column = at + columns
        for i in range(rows):
            for j in range(columns):
                self.grid.setdefault(self._row + i, {}).setdefault(at + j, text)


def _span(value: str | None) -> int:
    return (
        min(int(value), _MOST_SPAN)
        if value and value.isascii() and value.isdigit() and int(value[:6]) > 0
        else 1
    )
