"""What rewards ask of a dataset, compared with its columns before anything is sampled.

`column_faults` is for a reward that every row is scored with, `routing_faults` for one with `when`, of which only the
rows that it names have to supply what it asks for.
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
    """What is wrong with a reward that has `when`, given the columns of each row; without rows, what the names show.

    Reads rows until all columns that it asks for were in its rows. That it has none is a fault where the rows are
    `trained` on: an evaluation set may be of one task.
    """
    named = list(spec.options.when)
    if unknown := [column for column in named if column not in columns]:
        yield (
            f"reward {spec.name!r}: when names the column {unknown[0]!r}, which the dataset lacks; "
            f"{did_you_mean(unknown[0], columns)}its columns: {', '.join(columns) or 'none'}. An entry "
            "{path: ..., task: ...} of data.train puts the column task on its rows"
        )
        return
    if rows is None:
        yield from column_faults(spec, columns)
        return
    asked = {*spec.required, *spec.needs} - spec.supplied - spec.bound.keys()
    wanted, found = asked & set(columns), dict[str, None]()
    values: dict[str, dict[str, None]] = {column: {} for column in named}
    for row in rows():
        for column, kept in values.items():
            kept.update({repr(row.get(column)): None} if len(kept) < SHOWN else {})
        if spec.options.is_for(row):
            found.update(dict.fromkeys(row))
            if wanted <= found.keys():
                break
    if found:
        yield from column_faults(spec, tuple(found))
    elif trained:
        there = "; ".join(f"{column} is {', '.join(kept)}" for column, kept in values.items())
        when = {name: list(each) for name, each in spec.options.when.items()}
        yield (
            f"reward {spec.name!r}: when is {when}, and no row of the dataset has that; in its rows {there} (the first "
            f"{SHOWN} values)"
        )


def column_faults(spec: RewardSpec, columns: Sequence[str]) -> Iterator[str]:
    """What a reward asks for and the columns of a dataset do not supply."""
    name, listed = spec.name, ", ".join(columns) or "none"
    for asked in spec.required:
        if asked not in spec.supplied and asked not in spec.bound and asked not in columns:
            yield (
                f"reward {name!r} asks for {asked!r}, which has no default and which no column supplies; the dataset's "
                f"columns: {listed}. Map one in data.columns ({{{asked}: its_name}}), or set it in the entry"
            )
    for asked in spec.needs:
        if asked not in {*spec.required, *spec.bound, *columns}:
            yield (
                f"reward {name!r} needs the column {asked!r}, which the dataset lacks; its columns: {listed}. Map one "
                f"in data.columns ({{{asked}: its_name}}), or leave the reward out"
            )
    for option in spec.config_only:
        if option not in spec.bound and option in columns:
            yield (
                f"reward {name!r}: {option!r} is an option (keyword-only, with a default), and the dataset has a "
                f"column of that name, which would not be used; set it in the entry, or remove the '*' before it"
            )
