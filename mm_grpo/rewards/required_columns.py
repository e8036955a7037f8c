"""Checks that a dataset's columns supply the arguments of rewards, before anything is sampled.

`column_faults` is for a reward of every row, `routing_faults` for one with `when`: only the rows that it selects must
supply its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mm_grpo.errors import did_you_mean
from mm_grpo.rewards.spec import RewardSpec

SHOWN = 12
"""Values of a column that a message lists."""


def routing_faults(
    spec: RewardSpec,
    columns: Sequence[str],
    rows: Callable[[], Iterable[Mapping[str, Any]]] | None,
    *,
    trained: bool,
) -> Iterator[str]:
    """Yield what is wrong with a reward that has `when`. Without `rows` only the names of columns are checked.

    Reads rows until its rows have shown all columns that it asks for. That it selects no row is a fault only in rows
    that are `trained` on: an evaluation set may be of one task.
    """
    if unknown := [column for column in spec.options.when if column not in columns]:
        yield (
            f"reward {spec.name!r}: when names the column {unknown[0]!r}, which the dataset lacks; "
            f"{did_you_mean(unknown[0], columns)}its columns: {', '.join(columns) or 'none'}. An entry "
            "{path: ..., task: ...} of data.train puts the column task on its rows"
        )
        return
    if rows is None:
        yield from column_faults(spec, columns)
        return
    arguments = {*spec.required, *spec.needs} - spec.supplied - spec.bound.keys()
    needed, present = arguments & set(columns), dict[str, None]()
    examples: dict[str, dict[str, None]] = {column: {} for column in spec.options.when}
    for row in rows():
        for column, values in examples.items():
            values.update({repr(row.get(column)): None} if len(values) < SHOWN else {})
        if spec.options.is_for(row):
            present.update(dict.fromkeys(row))
            if needed <= present.keys():
                break
    if present:
        yield from column_faults(spec, tuple(present))
    elif trained:
        listed = "; ".join(f"{column} is {', '.join(values)}" for column, values in examples.items())
        when = {column: list(values) for column, values in spec.options.when.items()}
        yield (
            f"reward {spec.name!r}: when is {when}, and no row of the dataset has that; in its rows {listed} (the "
            f"first {SHOWN} values)"
        )


def column_faults(spec: RewardSpec, columns: Sequence[str]) -> Iterator[str]:
    """Yield what a reward asks for and the columns of a dataset do not supply."""
    name, listed = spec.name, ", ".join(columns) or "none"
    for argument in spec.required:
        if argument not in spec.supplied and argument not in spec.bound and argument not in columns:
            yield (
                f"reward {name!r} asks for {argument!r}, which has no default and which no column supplies; the "
                f"dataset's columns: {listed}. Map one in data.columns, or in the columns of its source "
                f"({{{argument}: its_name}}), or set it in the entry"
            )
    for column in spec.needs:
        if column not in {*spec.required, *spec.bound, *columns}:
            yield (
                f"reward {name!r} needs the column {column!r}, which the dataset lacks; its columns: {listed}. Map one "
                f"in data.columns ({{{column}: its_name}}), or leave the reward out"
            )
    for option in spec.config_only:
        if option not in spec.bound and option in columns:
            yield (
                f"reward {name!r}: {option!r} is an option (keyword-only, with a default), and the dataset has a "
                f"column of that name, which would not be used; set it in the entry, or remove the '*' before it"
            )
