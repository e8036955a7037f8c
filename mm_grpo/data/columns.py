"""Names of columns: ours and the dataset's (`data.columns`), nested ones by dots; names and values in messages.

`data.columns: {answer: reward_model.ground_truth}` reaches into mappings, `{box: objects.bbox.0}` into a list too. A
column whose own name holds the dots comes first.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Collection, Iterable, Mapping
from string import Formatter
from typing import Any

from mm_grpo.errors import DataError, did_you_mean

PROMPT_FIELDS = ("prompt", "image", "images", "video", "videos")
"""The names that a prompt is made of, in every layout."""
ABSENT = object()
"""Placeholder of a nested value that a row does not have."""
_short = reprlib.Repr()
_short.maxstring, _short.maxother, _short.maxlevel = 50, 24, 3
_short.maxlist = _short.maxtuple = _short.maxdict = 4


def check_columns(columns: Mapping[str, str], available: Collection[str], dataset: str) -> None:
    """Raise DataError for a column that the dataset lacks, and for a misspelt `prompt` or `images`.

    `available` are the dataset's columns and the dotted names in them.
    """
    for name, column in columns.items():
        near = difflib.get_close_matches(name.strip().casefold(), PROMPT_FIELDS, n=1, cutoff=0.8)
        if near and name not in PROMPT_FIELDS and not name.startswith(f"{near[0]}_"):
            raise DataError(
                f"data.columns.{name} = {column!r}: nothing reads {name!r}; did you mean {near[0]!r}? Legal keys are "
                f"{quoted(PROMPT_FIELDS)} and the columns that rewards ask for"
            )
        if column not in available:
            raise DataError(
                f"data.columns.{name} is {column!r}, and {dataset} has no such column; "
                f"{did_you_mean(column, available)}it has: {quoted(available)}. A source with other names than the "
                "rest is written {path: ..., columns: {...}}"
            )


def rename(names: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Map each of our names to the dataset's column, nested ones by their dotted path.

    A mapped column has our name alone, and hides another column of that name. The column around a nested one stays.

    >>> rename(["problem", "answer", "solution"], {"prompt": "problem", "answer": "solution"})
    {'prompt': 'problem', 'answer': 'solution'}
    >>> rename(["problem", "meta"], {"answer": "meta.gold"})
    {'answer': 'meta.gold', 'problem': 'problem', 'meta': 'meta'}
    """
    present = list(names)
    renamed = {name: path for name, path in columns.items() if locate(path, present)}
    mapped = set(renamed.values())
    return renamed | {name: name for name in present if name not in mapped and name not in columns}


def locate(path: str, present: Collection[Any]) -> tuple[str, list[str]] | None:
    """Return the column of a path of `data.columns`, and the remaining keys; None if the column is missing.

    >>> locate("reward_model.ground_truth", ["prompt", "reward_model"])
    ('reward_model', ['ground_truth'])
    """
    keys = path.split(".")
    for count in range(len(keys), 0, -1):
        column = ".".join(keys[:count])
        if column in present and all(keys[count:]):
            return column, keys[count:]
    return None


def value_at(row: Mapping[str, Any], path: str, what: str) -> Any:
    """Return the value of a column or a value inside it; ABSENT if the row lacks it, None below a null.

    DataError, which begins with `what`, if a value on the path has no keys.
    """
    location = locate(path, row)
    if location is None:
        return ABSENT
    column, keys = location
    value: Any = row[column]
    for depth, key in enumerate(keys):
        if value is None:
            return None
        if isinstance(value, Mapping):
            value = value.get(key, ABSENT)
        elif isinstance(value, list | tuple) and key.isdecimal():
            value = value[int(key)] if int(key) < len(value) else ABSENT
        else:
            raise DataError(
                f"{what} is {path!r}, and {'.'.join([column, *keys[:depth]])!r} is a {type(value).__name__} in this "
                f"row; legal is a mapping with the key {key!r}, or null"
            )
        if value is ABSENT:
            return ABSENT
    return value


def template_names(template: str) -> list[str]:
    """Return the columns that a `data.prompt_template` names.

    >>> template_names("{{x}} where is the {category} of {objects.0.name}?")
    ['category', 'objects.0.name']
    """
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def fill_template(template: str, values: Mapping[str, Any], row_name: str) -> str:
    """Fill the template with the values of a row: texts as they are, others as JSON. DataError for a null."""
    texts: list[str] = []
    for literal, name, _, _ in Formatter().parse(template):
        texts.append(literal)
        if name is not None:
            value = value_at(values, name, f"{row_name}: data.prompt_template")
            if value is None or value is ABSENT:
                raise DataError(
                    f"{row_name}: data.prompt_template asks for {name!r}, which is null or missing here; it has: "
                    f"{quoted(values)}"
                )
            texts.append(
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            )
    return "".join(texts)


def nested_names(column: str, value: Any, depth: int = 3) -> list[str]:
    """Return the dotted names of the values in nested mappings.

    >>> nested_names("a", {"b": {"c": 1}, "d": 2})
    ['a.b', 'a.b.c', 'a.d']
    """
    if not isinstance(value, Mapping) or not depth:
        return []
    return [
        name
        for key, inner in value.items()
        for name in (f"{column}.{key}", *nested_names(f"{column}.{key}", inner, depth - 1))
    ]


def quoted(names: Iterable[Any]) -> str:
    """Format names for a message."""
    return ", ".join(repr(name) for name in names) or "nothing"


def brief(value: object) -> str:
    """Format a value of a row for a message: of a long text both ends."""
    return _short.repr(value)
