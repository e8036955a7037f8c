"""Rows of the locations that `paths` finds: each is read as a `Part`, and `JoinedRows` are several parts.

JSONL stays on disk: a line is read again when its row is asked for. Parquet and Arrow are mapped from the copy that the
datasets library keeps in its cache. JSON and CSV are read into memory.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mm_grpo.data.hf_datasets import open_file, open_hub, open_saved
from mm_grpo.data.jsonl import JsonLines, read_json
from mm_grpo.data.paths import LEGAL, Location, missing
from mm_grpo.errors import DataError

MAX_CELL = 2**30
"""Most characters of a cell of a CSV file."""


@dataclass(frozen=True)
class Part:
    """Rows of one file, saved dataset or hub dataset."""

    rows: Any
    row_name: Callable[[int], str]
    """Names a row in messages."""
    folder: str | Path | None
    """Relative image paths start here."""


def read(location: Location, name: str, columns: Mapping[str, str]) -> Part:
    """Read the rows of a location for the dataset `name`; `columns` are `data.columns`.

    DataError if they are broken, empty, or cannot be reached.
    """
    path = Path(location.path)

    def numbered(rows: Any, folder: Path | None = path.parent) -> Part:
        return Part(rows, lambda index: f"{location.path} row {index}", folder)

    try:
        if location.kind == "hub":
            return numbered(open_hub(location.path, columns, missing(path)), None)
        if location.kind == "saved":
            return numbered(open_saved(path, location.split, columns), path)
        if path.exists() and not path.is_file():
            raise DataError(f"{name}: {path} is a pipe, a socket or a device, not a file; {LEGAL}")
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            jsonl = JsonLines(path)
            return Part(jsonl, jsonl.row_name, path.parent)
        if suffix in (".csv", ".tsv", ".txt"):
            rows, lines = read_csv(path)
            return Part(rows, lambda index: f"{path}:{lines[index]}", path.parent)
        return numbered(read_json(path) if suffix == ".json" else open_file(path, columns))
    except OSError as error:
        raise DataError(f"{name}: {path} cannot be read ({error.strerror or error})") from None


def read_csv(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the rows of a CSV file; return them, and the line on which each ends.

    The first line names the columns; the cells are parted by what it has most of: commas, semicolons, tabs or bars.
    Cells are text and never become numbers; an empty cell is null.
    """
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    csv.field_size_limit(MAX_CELL)  # a cell may be an image; the limit of csv itself is 128 KiB
    with path.open("rb") as file:
        head = re.sub('"[^"]*"', "", file.readline(MAX_CELL).decode(errors="replace"))
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t|", key=head.count)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            names = list(reader.fieldnames or ())
            if len(set(names)) < len(names):
                raise ValueError(f"the first line names the columns, once each; it is {names}")
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        f"a row has as many cells as names; {delimiter!r} in a cell needs quotes"
                    )
                rows.append({key: cell or None for key, cell in row.items()})
                lines.append(reader.line_num)
        except (ValueError, csv.Error) as error:
            line = max(reader.reader.line_num, 1)
            fault = f"is not valid CSV in UTF-8 ({error}); correct it, or save it in UTF-8"
            raise DataError(f"{path}:{line}: {fault}") from None
    if not rows:
        raise DataError(f"{path}: is empty; it needs a line of names and at least 1 row")
    return rows, lines


def place(ends: Sequence[int], index: int) -> tuple[int, int]:
    """Return the number of the part with row `index`, and the row's index there. Parts end at `ends`."""
    if not 0 <= index < ends[-1]:
        raise IndexError(f"row {index} of {ends[-1]}")
    at = bisect.bisect_right(ends, index)
    return at, index - (ends[at - 1] if at else 0)


class JoinedRows:
    """Rows of several parts, one part after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self._ends = list(itertools.accumulate(len(part.rows) for part in parts))
        self.in_memory = all(getattr(p.rows, "in_memory", isinstance(p.rows, list | tuple)) for p in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Any:
        part, inner = self._place(index)
        return part.rows[inner]

    def encoded_row(self, index: int) -> Any:
        """Return the row with the images of every column still encoded."""
        part, inner = self._place(index)
        return getattr(part.rows, "encoded_row", part.rows.__getitem__)(inner)

    def row_name(self, index: int) -> str:
        """Return a row's name for messages."""
        part, inner = self._place(index)
        return part.row_name(inner)

    def folder(self, index: int) -> str | Path | None:
        """Return the folder that the row's relative image paths start from."""
        return self._place(index)[0].folder

    @cached_property
    def column_names(self) -> list[str]:
        """The columns of all parts, in order of appearance; a list has the columns of all its rows."""
        names: dict[str, None] = {}
        for rows in (part.rows for part in self.parts):
            if (columns := getattr(rows, "column_names", None)) is None:
                examples = rows if isinstance(rows, list | tuple) else [rows[0]]
                columns = (name for row in examples if isinstance(row, Mapping) for name in row)
            names.update(dict.fromkeys(columns))
        return list(names)

    def _place(self, index: int) -> tuple[Part, int]:
        at, inner = place(self._ends, index)
        return self.parts[at], inner
