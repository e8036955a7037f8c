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
_short.maxlist = _short.maxtuple = _short.maxdict = 3


def check_columns(columns: Mapping[str, str], available: Collection[str], dataset: str) -> None:
    """Refuse a mapping to a column that the dataset lacks, and a misspelt `prompt` or `images`. DataError.

    `available` are the dataset's columns, and what lies in them under dotted names.
    """
    for ours, theirs in columns.items():
        near = difflib.get_close_matches(ours.strip().casefold(), PROMPT_FIELDS, n=1, cutoff=0.8)
        if near and ours not in PROMPT_FIELDS and not ours.startswith(f"{near[0]}_"):
            raise DataError(
                f"data.columns.{ours} = {theirs!r}: nothing reads {ours!r}; did you mean {near[0]!r}? Legal keys are "
                f"{quoted(PROMPT_FIELDS)} and the columns that rewards ask for"
            )
        if theirs not in available:
            raise DataError(
                f"data.columns.{ours} is {theirs!r}, and {dataset} has no such column; "
                f"{did_you_mean(theirs, available)}it has: {quoted(available)}. A source with other names than the "
                "rest is written {path: ..., columns: {...}}"
            )


def rename(names: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Map each of our names to the dataset's column, nested ones by their dotted path.

    A mapped column is known by our name alone; a column that already bears that name gives way to it. The column that a
    nested one lies in stays.

    >>> rename(["problem", "answer", "solution"], {"prompt": "problem", "answer": "solution"})
    {'prompt': 'problem', 'answer': 'solution'}
    >>> rename(["problem", "meta"], {"answer": "meta.gold"})
    {'answer': 'meta.gold', 'problem': 'problem', 'meta': 'meta'}
    """
    present = list(names)
    ours = {our: their for our, their in columns.items() if locate(their, present)}
    mapped = set(ours.values())
    return ours | {name: name for name in present if name not in mapped and name not in columns}


def locate(path: str, present: Collection[Any]) -> tuple[str, list[str]] | None:
    """The column that a name of `data.columns` lies in, and the keys on the way into it; None where there is none.

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
    """The value of a column or of what lies in it; ABSENT where the row lacks it, None below a null.

    DataError, which begins with `what`, where something on the way has no keys.
    """
    found = locate(path, row)
    if found is None:
        return ABSENT
    column, keys = found
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
    """The columns that a `data.prompt_template` names.

    >>> template_names("{{x}} where is the {category} of {objects.0.name}?")
    ['category', 'objects.0.name']
    """
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def fill_template(template: str, values: Mapping[str, Any], row_name: str) -> str:
    """The template with the values of a row: texts as they are, others as JSON. DataError for one that is null."""
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
    """The dotted names of what lies in the mappings of a value.

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
    """Names as a message lists them."""
    return ", ".join(repr(name) for name in names) or "nothing"


def brief(value: object) -> str:
    """A value of a row as a message shows it: of long texts and of base64 both ends."""
    return _short.repr(value)
