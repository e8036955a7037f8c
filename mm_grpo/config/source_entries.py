"""Sources of rows: a path, a task, a mixture of entries, evaluation sets by name.

`data.train: [{path: boxes.jsonl, weight: 3, task: grounding}, count.jsonl]` has two entries. `SourceEntry` declares
what an entry may hold beside its rows. In a config `path` is a YAML value; in Python it may be rows (data/mixture.py).
To let sources differ in one more field of `data`: a field of `SourceEntry`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from mm_grpo.config.messages import Accepts, FieldError, shown
from mm_grpo.config.section import Section
from mm_grpo.config.values import Number, PathText, PromptText, Template, is_source, path_text, plain_mapping
from mm_grpo.errors import ConfigError

_Text = Annotated[str, Field(pattern=r"\S")]


class SourceEntry(Section):
    """Source of a mixture, with fields that replace `data`'s for its rows; help on them is in `data`."""

    where: ClassVar[str] = "source"
    path: Any
    """The rows: a path, a list of paths, a task mapping, or in Python rows."""
    weight: Number = Field(default=1.0, gt=0)
    """Share of the prompts, over the sum of all weights, > 0."""
    task: _Text | None = None
    """What the column task of the rows holds."""
    columns: dict[str, str] = Field(default_factory=dict)
    prompt_template: Template | None = None
    image_dir: PathText | None = None
    system_prompt: Annotated[PromptText, Field(pattern=r"\S")] | None = None
    text_only: bool = False
    min_pixels: int | None = Field(default=None, ge=1)
    max_pixels: int | None = Field(default=None, ge=1)
    """Most pixels of an image of these rows, from data.min_pixels to data.max_pixels; null is the run's limit."""


OWN = tuple(name for name in SourceEntry.model_fields if name not in ("path", "weight", "task"))
"""Fields of `data` that an entry may set for its own rows."""


def read_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with checked values; its rows are not checked. FieldError says what is wrong."""
    try:
        checked = SourceEntry.model_validate(dict(entry))
    except ConfigError as error:
        raise FieldError("; ".join(str(error).splitlines())) from None
    return {key: value for key, value in checked if key in checked.model_fields_set}


def map_source(source: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every path and task of a source, a mixture or sets by name."""
    if isinstance(source, list):
        return [map_source(entry, change) for entry in source]
    if isinstance(source, dict) and "path" in source:
        return {**source, "path": map_source(source["path"], change)}
    if isinstance(source, dict) and not is_source(source):
        return {name: map_source(entry, change) for name, entry in source.items()}
    return change(source)


def _source(value: Any) -> str | list[Any] | dict[str, Any]:
    """Read one source, a list of paths, whose rows come one after the other, or a mixture.

    A mixture is a list of entries with at least one mapping.
    """
    if not isinstance(value, list | tuple) or not any(isinstance(entry, Mapping) for entry in value):
        return _entry(value)
    return [_named(f"entry {number}", entry, _entry) for number, entry in enumerate(value, start=1)]


def _entry(value: Any) -> str | list[Any] | dict[str, Any]:
    if isinstance(value, Mapping) and "path" in value:
        entry = read_entry(plain_mapping(value))
        return entry | {"path": _rows(entry["path"])}
    return _rows(value)


def _rows(value: Any) -> str | list[str] | dict[str, Any]:
    """Read a path, glob or dataset name, a list of them, or a mapping whose `task` names a built-in task."""
    if isinstance(value, list | tuple) and value:
        return [path_text(path) for path in value]
    if not isinstance(value, Mapping):
        return path_text(value)
    source = plain_mapping(value)
    if not isinstance(source.get("task"), str) or not source["task"]:
        raise ValueError
    return source


def _set(value: Any) -> str | list[Any] | dict[str, Any]:
    """Read the source of an evaluation set; FieldError if it has a weight."""
    source = _source(value)
    entries = source if isinstance(source, list) else [source]
    if any(isinstance(entry, dict) and "weight" in entry for entry in entries):
        raise FieldError("weight is for data.train; an evaluation answers every row once: leave it out")
    return source


def _sources(value: Any) -> str | list[Any] | dict[str, Any]:
    """Read one source, or a mapping of set names to sources; the first set is the headline."""
    if not isinstance(value, Mapping) or is_source(value):
        return _set(value)
    if not value:
        raise ValueError
    if odd := [name for name in value if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", str(name))]:
        raise FieldError(f"the name of a set is letters, digits, '_', '-' and '.'; {shown(odd[0])} is not")
    return {str(name): _named(f"the set {name}", source, _set) for name, source in value.items()}


def _named(what: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """Call `read(value)`; a FieldError begins with the name of the value."""
    try:
        return read(value)
    except ValueError as error:
        raise FieldError(f"{what}, {shown(value)}: {str(error) or f'must be {_SOURCE}'}") from None


_SOURCE = "a path, a list of paths, or a mapping with the key path or the key task"
Source = Annotated[
    str | list[Any] | dict[str, Any],
    PlainValidator(_source),
    Accepts(f"{_SOURCE}, or a list of such mappings"),
]
Sources = Annotated[
    str | list[Any] | dict[str, Any],
    PlainValidator(_sources),
    Accepts(f"{_SOURCE}, a list of such mappings, or a mapping of set names to those"),
]
