"""Gold answers that a warm start teaches (`mm-grpo warm --answer COLUMN`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.columns import brief
from mm_grpo.data.media_check import rows_to_look_at
from mm_grpo.errors import DataError
from mm_grpo.preflight.gold_text import GOLD, as_text, gold_text
from mm_grpo.rewards.builtins.answers import gold_texts
from mm_grpo.rewards.resolve import resolve_entries
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import builtin_name
from mm_grpo.types import Prompt

WHOLE = ("iou", "giou", "box_match", "clicking", "contains", "temporal_iou")
"""Built-ins whose column is one right answer also if it is a list."""
Lists = Literal["first", "each"]


class GoldAnswers:
    """Texts that rows teach: their `column`, as a reward of the config reads it, in the form of `data.gold_template`.

    Of several right answers `lists` takes the first, or each in turn from one pass over the rows to the next.
    """

    def __init__(self, config: GRPOConfig, column: str, lists: Lists | None) -> None:
        self.column, self.lists, self.template = column, lists, config.data.gold_template or "{gold}"
        specs = resolve_entries(config.rewards) if config.rewards else []
        self._readers = [
            s for s in specs if s.needs[:1] == (column,) and column not in s.bound and builtin_name(s) in GOLD
        ]

    def identity(self, rows: Rows) -> dict[str, Any]:
        """Return what a resumed warm start must have in common with the first, as JSON values."""
        values = {"answer": self.column, "lists": self.lists, "gold_template": self.template}
        identity: dict[str, Any] = json.loads(json.dumps({**values, "rows": rows.fingerprint()}))
        return identity

    def check(self, rows: Rows) -> None:
        """Raise DataError if a row teaches nothing. Of rows that are not in memory some are looked at."""
        for source in rows.sources:
            for index in rows_to_look_at(source):
                self.values(source.row_name(index), source.fields(index).other_columns)

    def values(self, row: str, columns: Mapping[str, Any]) -> list[Any]:
        """Return the right answers of a row, one at least, from the columns that the model is not shown.

        DataError if there is none, or several without `lists`.
        """
        value, reader = columns.get(self.column), self._reader(columns)
        items = value if isinstance(value, list | tuple) else [value]
        values: list[Any] = [value]
        # without a reader a list of numbers is one answer, such as a box
        if reader is not None or not items or any(isinstance(item, str | Mapping | None) for item in items):
            values = []
            with suppress(TypeError):  # a value that no reward reads
                values = list(gold_texts(value))
        if reader is not None and (name := builtin_name(reader)) in WHOLE:
            values = [value] if values or name == "box_match" else []  # a picture may hold no box
        is_missing = isinstance(value, float) and math.isnan(value)  # pandas writes nan
        if is_missing or not values:
            raise DataError(
                f"{row}: --answer {self.column}: is {brief(value)}; legal is a text, a number, or a list of these. The "
                f"row's columns are {', '.join(columns) or 'none'}; correct the row, or name another column"
            )
        if len(values) > 1 and self.lists is None:
            raise DataError(
                f"{row}: --answer {self.column}: has {len(values)} right answers, the first {values[0]!r}; say which "
                "are taught: --lists first, or --lists each (one a pass over the rows, in turn)"
            )
        return values if self.lists == "each" else values[:1]

    def text(self, prompt: Prompt, turn: int) -> str:
        """Return the text that a prompt's row teaches in pass number `turn` over the rows, from 0."""
        columns = prompt.sample.other_columns
        values, reader = self.values(prompt.uid, columns), self._reader(columns)
        value = values[turn % len(values)]
        text = as_text(value)
        if reader is not None:
            sample = replace(prompt.sample, columns={**prompt.sample.columns, self.column: value})
            text = gold_text(reader, replace(prompt, sample=sample), strict=True) or text
        return self.template.replace("{gold}", text)

    def _reader(self, columns: Mapping[str, Any]) -> RewardSpec | None:
        """Return the built-in that reads the column of a row, None if none does."""
        return next((spec for spec in self._readers if spec.applies_to(columns)), None)
