"""Progress of a run in a notebook: one table that grows in place.

A step is a row; so is what is printed meanwhile, such as an evaluation or a guard's warning, over all columns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from typing import Any, Self

from rich.console import Console

from mm_grpo.run.progress import Progress
from mm_grpo.terminal import printable

ROWS = 200
"""Rows that are shown, the newest: each step sends the whole table anew."""


def progress_of_run(total: int, **options: Any) -> Progress:
    """Return the progress of a run for the place where it runs: a notebook's table, or a bar and lines."""
    return (NotebookProgress if Console().is_jupyter else Progress)(total, **options)


class NotebookProgress(Progress):
    """Shows the steps as a table in one output of a cell."""

    _handle: Any = None

    def __init__(self, total: int, **options: Any) -> None:
        super().__init__(total, **options)
        self._rows: list[str | dict[str, str]] = []

    def __enter__(self) -> Self:
        if self._headline and not self._quiet:
            print(printable(self._headline), flush=True)
        self.begin()
        return self

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the row of a step, with the `kl` that a terminal has no place for."""
        self._kl = {"kl": f"{metrics['kl']:.4f}"} if metrics.get("kl") is not None else {}
        super().on_log(step, metrics)

    def show_step(self, step: int, values: Mapping[str, str]) -> None:
        """Add a row with the values of a step by their labels."""
        self._rows.append({"step": f"{step}/{self.total}", **values, **self._kl})
        self._draw()

    def print(self, text: str) -> None:
        """Add a row with a text."""
        self._rows.append(text)
        self._draw()

    def evaluating(self, name: str, done: int, total: int) -> None:
        """Show below the rows how far an evaluation is, once a second at most."""
        if time.monotonic() - self._printed >= 1:
            self._draw(f"evaluating {name} {done}/{total}")

    def _draw(self, status: str = "") -> None:
        """Show the table, in the place of the one before."""
        if self._quiet:
            return
        from IPython.display import HTML, display

        self._printed = time.monotonic()
        if self._handle is None:
            self._handle = display(HTML(self._html(status)), display_id=True)
        else:
            self._handle.update(HTML(self._html(status)))

    def _html(self, status: str) -> str:
        columns = dict.fromkeys(label for row in self._rows if isinstance(row, dict) for label in row)
        earlier = len(self._rows) - ROWS
        first = [f"{earlier} earlier rows: see metrics.jsonl"] if earlier > 0 else []
        lines = [_row("th", columns)]
        for row in [*first, *self._rows[-ROWS:], *filter(None, [status])]:
            if isinstance(row, str):
                text = escape(printable(row)).replace("\n", "<br>")
                lines.append(
                    f'<tr><td colspan="{max(1, len(columns))}" style="text-align: left">{text}</td></tr>'
                )
            else:
                lines.append(_row("td", (row.get(label, "") for label in columns)))
        return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Any) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"
