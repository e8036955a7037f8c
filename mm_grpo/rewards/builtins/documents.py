"""Rewards for structured documents: `json_schema` and `table_f1`; and how tables are read from a text.

Tables are rows of cells: HTML, Markdown, CSV and TSV. What a completion can cost is bounded, for models do write
100,000 opening tags: 200,000 characters and 20,000 cells of a table are read.
"""

from __future__ import annotations

import csv
import html
import importlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NoReturn

from mm_grpo.rewards.builtins import library
from mm_grpo.rewards.builtins.answers import check_choice, final_part, normalise
from mm_grpo.rewards.registry import reward

LONGEST_TABLE = 200_000  # characters
MOST_CELLS = 20_000
MOST_SPAN = 100

Table = list[list[str]]
Entry = tuple[str, str, str]


@reward("json_schema")
def json_schema(completion: str, schema: Mapping[str, Any] | str | None = None) -> float:
    """1 when the completion's final part is JSON, and valid against a JSON schema.

    The final part is the inside of the last `<answer>` block, else what follows `</think>`, else
    everything; one Markdown fence around the whole of it is taken off. Nothing else may stand beside
    the JSON. NaN and Infinity are not JSON. `schema` is a mapping or JSON text, from the config or from
    a column of that name (a column had better hold text: a table of mappings fills missing keys with
    None); null asks for any JSON. The draft is that of its `$schema`, else 2020-12; references to
    other documents are not fetched.

    Returns 1.0 or 0.0, never None; 0.0 too for what nests deeper than Python can follow. The time that a schema takes
    is not bounded: with one that backtracks set `isolated: true` in the entry. ValueError when the schema is no
    schema. For structured extraction: receipts and forms, such as CORD and SROIE. Needs the package jsonschema.

    >>> json_schema('{"total": 12.5}', schema={"type": "object", "required": ["total"]})
    1.0
    >>> json_schema('Sure: {"total": 12.5}'), json_schema("[NaN]")
    (0.0, 0.0)
    """
    validator = None if schema is None else _validator(_as_json(schema))
    try:
        value = json.loads(_unfenced(final_part(completion)), parse_constant=_no_constant)
    except (ValueError, RecursionError):  # RecursionError: 100,000 opening brackets
        return 0.0
    try:
        return 1.0 if validator is None else float(validator.is_valid(value))
    except BaseException as error:
        # 400 digits against a multipleOf; nesting, of which the Rust that jsonschema rests on may make a panic
        if isinstance(error, RecursionError | OverflowError) or type(error).__name__ == "PanicException":
            return 0.0
        raise


def _unfenced(text: str) -> str:
    """Strip one Markdown fence around the whole text."""
    lines = text.strip().split("\n")
    if len(lines) > 2 and lines[0].strip().lower() in ("```", "```json") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return text


def _as_json(schema: Mapping[str, Any] | str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"the schema cannot be written as JSON: {error}") from error


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    jsonschema = library("json_schema")
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON ({error}); it is a mapping or JSON text") from error
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(parsed)
    except jsonschema.exceptions.SchemaError as error:
        raise ValueError(f"the schema is not a JSON schema: {error.message}") from error
    # With a registry of our own nothing is fetched; the default one opens the address of a "$ref".
    return kind(parsed, registry=importlib.import_module("referencing").Registry())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


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
    check_choice("align", align, "headers", "position")
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
    cells = [[_cell_value(cell) for cell in row] for row in rows]
    if not by_name:
        return Counter((str(i), str(j), cell) for i, row in enumerate(cells) for j, cell in enumerate(row))
    head = cells[0]
    return Counter(
        (row[0], head[j] if j < len(head) else "", cell)
        for row in cells[1:]
        for j, cell in enumerate(row)
        if j > 0
    )


def _cell_value(cell: str) -> str:
    text = normalise(cell)
    try:
        return repr(float(text.replace(",", "")))
    except ValueError:
        return text


def read_table(text: str) -> Table:
    """The first table of a text; [] when there is none.

    >>> read_table("Here: | a | b |\\n|---|---|\\n| 1 | 2 |")
    [['a', 'b'], ['1', '2']]
    >>> read_table("<table><tr><td colspan=2>a<tr><td>1<td>2</table>")
    [['a', 'a'], ['1', '2']]
    """
    text = text[:LONGEST_TABLE]
    if re.search(r"<t(?:able|r|d|h)\b", text, re.IGNORECASE):
        return _kept(_html(text))
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


# A tag, a declaration, or text up to the next "<". Python's own HTMLParser takes quadratic time for tags that
# never end (200 s for 50,000 "<td "); here no character is read twice.
_HTML = re.compile(
    r"<(?P<close>/?)(?P<tag>[a-zA-Z][a-zA-Z0-9]*)(?P<attributes>[^<>]*)>|<[!?][^<>]*>|(?P<text>[^<]+|<)"
)
_SPAN = re.compile(r"\b(row|col)span\s{0,4}=\s{0,4}[\"']?(\d{1,6})", re.IGNORECASE | re.ASCII)
_LONG_REFERENCE = re.compile(r"&#[xX]?[0-9a-fA-F]{9,};?")  # html.unescape raises on thousands of digits


def _html(text: str) -> Table:
    """The first table. Closing tags may be missing; a cell is repeated in every place that it spans."""
    grid: dict[int, dict[int, str]] = {}
    row, column, cells = -1, 0, 0
    spans: tuple[int, int] | None = None  # rows and columns of the open cell
    words: list[str] = []
    for match in [*_HTML.finditer(_without_comments(text)), None]:  # None: the end closes a cell too
        tag = (match["tag"] or "").lower() if match else "table"
        opens = match is not None and not match["close"]
        if spans is not None and (tag in ("tr", "td", "th") or (tag == "table" and not opens)):
            cells += spans[0] * spans[1]
            if cells > MOST_CELLS:
                break
            while column in grid.get(row, {}):  # a cell above may reach into this row
                column += 1
            written = " ".join(html.unescape(_LONG_REFERENCE.sub("", "".join(words))).split())
            for i in range(row, row + spans[0]):
                for j in range(column, column + spans[1]):
                    grid.setdefault(i, {}).setdefault(j, written)
            column += spans[1]
            spans, words = None, []
        if tag == "table" and grid and not opens:
            break
        if match and opens and tag == "tr":
            row, column = row + 1, 0
        elif match and opens and tag in ("td", "th"):
            row = max(row, 0)
            found = {kind.lower(): min(int(n), MOST_SPAN) for kind, n in _SPAN.findall(match["attributes"])}
            spans = found.get("row") or 1, found.get("col") or 1
        elif match and spans is not None and (match["text"] or tag == "br"):
            words.append(match["text"] or " ")
    return [[grid[i].get(j, "") for j in range(max(grid[i]) + 1)] for i in sorted(grid)]


def _without_comments(text: str) -> str:
    first, *rest = text.split("<!--")
    return first + "".join(part.partition("-->")[2] for part in rest)
