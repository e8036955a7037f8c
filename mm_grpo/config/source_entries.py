"""One source of a mixture as an entry: its rows, its weight, and what it is read with in place of `data`'s own fields.

`data.train: [{path: boxes.jsonl, weight: 3, task: grounding}, count.jsonl]` has two entries. `read_entry` checks one,
whoever wrote it: a config, where `path` is what YAML holds, or Python, where it may be rows (data/mixture.py). To let
sources differ in one more field of `data`: its name in `OWN`, and its check in `_CHECKS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mm_grpo.config.messages import FieldError
from mm_grpo.config.yaml_file import shown
from mm_grpo.errors import did_you_mean
from mm_grpo.types import is_number

OWN = ("columns", "layout", "answer_from", "image_dir", "system_prompt", "text_only")
"""Fields of `data` that an entry may set for its own rows."""
KEYS = ("path", "weight", "task", *OWN)
LAYOUTS = ("trl", "openai", "verl", "ms_swift", "sharegpt", "r1v")
_ELSEWHERE = {
    "split": "write it into the path: folder:split, or owner/name:config:split of the hub",
    "name": "write it into the path: owner/name:config:split of the hub",
    "probability": "write weight (shares are weights over their sum)",
    "answer": "write columns: {answer: ...}",
}


def read_entry(entry: Mapping[str, Any], path: Callable[[Any], Any]) -> dict[str, Any]:
    """The entry with checked values; `path` checks what holds the rows. FieldError says what is wrong."""
    for key in entry:
        if key not in KEYS:
            hint = _ELSEWHERE.get(str(key)) or f"{did_you_mean(str(key), KEYS)}its keys are {', '.join(KEYS)}"
            raise FieldError(f"an entry of a mixture has no key {shown(key)}; {hint}")
    if "path" not in entry:
        raise FieldError("an entry of a mixture needs the key path, as in {path: rows.jsonl, weight: 2}")
    found = {"path": path(entry["path"])}
    for key in KEYS[1:]:
        if key in entry:
            value, (legal, check) = entry[key], _CHECKS[key]
            try:
                found[key] = check(value)
            except (TypeError, ValueError):
                raise FieldError(f"{key} is {shown(value)}; it must be {legal}") from None
    return found


def check_entries(entries: Sequence[Any]) -> None:
    """FieldError for a source that stands twice with the same settings: its rows would fill a step twice."""
    seen: list[Any] = []
    for entry in entries:
        mapping = entry if isinstance(entry, Mapping) and "path" in entry else {"path": entry}
        bare = {key: value for key, value in mapping.items() if key != "weight"}
        if any(_same(bare, other) for other in seen):
            raise FieldError(
                f"{shown(bare['path'])} stands twice in the mixture, read in the same way; write it once, "
                "with the sum of the weights"
            )
        seen.append(bare)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two entries are the same; rows and datasets are compared by what they are, not by their contents."""
    paths = one["path"], other["path"]
    plain = all(isinstance(path, str | os.PathLike | list | tuple | Mapping) for path in paths)
    rows = any(isinstance(p, list | tuple) and p and isinstance(p[0], Mapping) for p in paths)
    equal = paths[0] == paths[1] if plain and not rows else paths[0] is paths[1]
    return equal and {**one, "path": None} == {**other, "path": None}


def _weight(value: Any) -> float:
    if not (is_number(value) and value > 0):
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _columns(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        raise ValueError
    return dict(value)


def _path(value: Any) -> str | None:
    return None if value is None else _text(os.fspath(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _one_of(*legal: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if value is not None and value not in legal:
            raise ValueError
        return None if value is None else str(value)

    return check


# Key: what is legal, for the message, and the check that gives the value.
_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "weight": (
        "a finite number above 0 (shares are weights over their sum; leave out a source of none)",
        _weight,
    ),
    "task": ("a text, which becomes the column task of the rows", _text),
    "columns": ("a mapping of our names to the dataset's, such as {answer: label}", _columns),
    "layout": (f"one of {', '.join(LAYOUTS)}, or null", _one_of(*LAYOUTS)),
    "answer_from": ("last_turn, column or null", _one_of("last_turn", "column")),
    "image_dir": ("a folder, or null", _path),
    "system_prompt": ("text, or null", lambda value: None if value is None else _text(value)),
    "text_only": ("true or false", _flag),
}
