"""Gold answers that a warm start teaches (`mm-grpo warm --answer COLUMN`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.image_check import rows_to_look_at
from mm_grpo.errors import DataError
from mm_grpo.preflight.gold_text import GOLD, as_text, gold_text
from mm_grpo.rewards.builtins.answers import gold_texts
from mm_grpo.rewards.resolve import resolve_entries
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import builtin_name
from mm_grpo.types import Prompt

WHOLE = ("iou", "giou", "box_match", "clicking", "contains")
"""Built-ins whose column is one right answer also if it is a list."""
Lists = Literal["first", "each"]


class GoldAnswers:
    """Texts that rows teach: their `column`, as a reward of the config reads it, in the form of `data.gold_template`.

    Of several right answers `lists` takes the first, or each in turn from one pass over the rows to the next.
    """

    def __init__(self, config: GRPOConfig, column: str, lists: Lists | None) -> None:
        self.column, self.lists, self.template = column, lists, config.data.gold_template or "{gold}"
        specs = resolve_entries(config.rewards) if config.rewards else []
        readers = [s for s in specs if s.needs[:1] == (column,) and column not in s.bound]
        self.readers = [s for s in readers if builtin_name(s) in GOLD]

    def identity(self, rows: Rows) -> dict[str, Any]:
        """Return what a resumed warm start must have in common with the first, as JSON values."""
        values = {"answer": self.column, "lists": self.lists, "gold_template": self.template}
        identity: dict[str, Any] = json.loads(json.dumps({**values, "rows": rows.fingerprint()}))
        return identity

    def check(self, rows: Rows) -> None:
        """Raise DataError if a row teaches nothing. Of rows that are not in memory some are looked at."""
        for source in rows.sources:
            for index in rows_to_look_at(source):
                self.values(source.row_name(index), source.fields(index).columns)

    def values(self, row: str, columns: Mapping[str, Any]) -> list[Any]:
        """Return the right answers of a row, one at least. DataError if there is none, or several without `lists`."""
        value, reader = columns.get(self.column), self._reader(columns)
        is_text = isinstance(value, str) or (
            isinstance(value, list | tuple)
            # other lists of numbers are one answer, such as a box
            and (
                reader is not None
                or not value
                or any(item is None or isinstance(item, str) for item in value)
            )
        )
        values = gold_texts(value) if is_text else [value]
        name = None if reader is None else builtin_name(reader)
        if name in WHOLE and (values or name == "box_match"):  # a picture may hold no box
            values = [value]
        is_missing = value is None or (isinstance(value, float) and math.isnan(value))  # pandas writes nan
        if is_missing or not values:
            names = ", ".join(columns) or "none"
            raise DataError(
                f"{row}: --answer {self.column}: the row has no answer there; its columns are {names}. Write an "
                "answer, leave the row out, or name another column"
            )
        if len(values) > 1 and self.lists is None:
            raise DataError(
                f"{row}: --answer {self.column}: {len(values)} right answers, the first {values[0]!r}; say which are "
                "taught: --lists first, or --lists each (one a pass over the rows, in turn)"
            )
        return values if self.lists == "each" else values[:1]

    def text(self, prompt: Prompt, turn: int) -> str:
        """Return the text that a prompt's row teaches in pass number `turn` over the rows, from 0."""
        columns = prompt.sample.columns
        values = self.values(prompt.uid, columns)
        value = values[turn % len(values)]
        text = as_text(value)
        if (reader := self._reader(columns)) is not None:
            sample = replace(prompt.sample, columns={**columns, self.column: value})
            text = gold_text(reader, replace(prompt, sample=sample)) or text
        return self.template.replace("{gold}", text)

    def _reader(self, columns: Mapping[str, Any]) -> RewardSpec | None:
        """Return the built-in that reads a row's gold; None if there is none."""
        return next((spec for spec in self.readers if spec.applies_to(columns)), None)
