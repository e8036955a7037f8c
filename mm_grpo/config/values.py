"""Kinds of value that the config's fields hold: annotated types, each with what it reads and how it is described.

A kind that pydantic cannot check by its type alone has a function here that takes what was written and returns
what is held, or raises FieldError with the words that follow the field's name. `Accepts` are the words for what a
field accepts. The fields themselves are in `sections`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from mm_grpo.config.messages import Accepts, FieldError
from mm_grpo.config.source_entries import check_entries, read_entry
from mm_grpo.config.yaml_file import is_source, plain, shown
from mm_grpo.files import expand_home
from mm_grpo.types import LARGEST, LONGEST, is_number


def _path(value: Any) -> Any:
    """A path as text, with the home folder in place of `~`."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise FieldError("holds a NUL character, which no path can")
    if len(value) > 4096 or any(len(os.fsencode(part)) > 255 for part in value.split("/")):
        raise FieldError("is longer than any path: 255 bytes a name, 4096 in all")
    try:
        return expand_home(value)
    except ValueError as error:
        raise FieldError(str(error)) from None


def _number(value: Any) -> Any:
    """PyYAML reads `1e-6` as a text; a mapping that it loaded may still hold one."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        return float(value)
    return value


def _bounded(value: float, info: ValidationInfo) -> float:
    """A number that float32 can hold, and the inverse of which it can hold."""
    most = LONGEST if str(info.field_name).endswith("timeout") else LARGEST
    if value and not 1e-30 <= abs(value) <= most:
        raise FieldError(f"must be 0, or from 1e-30 to {most:.3g} in size")
    return value


def _headline(value: Any) -> str | None:
    if value is None:
        return None
    mark = r">=\s*[-+]?(\d{1,18}(\.\d*)?|\.\d+)"
    if not isinstance(value, str) or not re.fullmatch(rf"\S.*({mark}|\smean)", value.strip()):
        raise FieldError(
            "must be a reward's name and its least mark, such as exact_match >= 1, or its name and mean, such as iou "
            "mean, or null"
        )
    return value.strip()


def _source(value: Any) -> str | list[Any] | dict[str, Any]:
    """One source, a list of paths, whose rows come one after the other, or a mixture: entries, of which one is a
    mapping at least."""
    if isinstance(value, Mapping) and "path" in value:
        return _entry(value)
    if not isinstance(value, list | tuple) or not any(isinstance(each, Mapping) for each in value):
        return _rows(value)
    entries = []
    for number, each in enumerate(value, start=1):
        try:
            entries.append(_entry(each) if isinstance(each, Mapping) and "path" in each else _rows(each))
        except FieldError as error:
            raise FieldError(f"entry {number}, {shown(each)}: {error}") from None
    check_entries(entries)
    return entries


def _entry(value: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a mixture, with its weight as a number where YAML read a text."""
    entry = _plain(value)
    if "weight" in entry:
        entry["weight"] = _number(entry["weight"])
    return read_entry(entry, _rows)


def _rows(value: Any) -> str | list[str] | dict[str, Any]:
    """A path, glob or dataset name, a list of those, or a mapping whose `task` names a built-in task."""
    value, example = _path(value), "such as {task: shapes, split: train, size: 2000}"
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, list | tuple) and value:
        paths = [_path(each) for each in value]
        wrong = next((each for each in paths if not isinstance(each, str) or not each), None)
        if wrong is None:
            return [str(each) for each in paths]
        raise FieldError(f"a list holds paths, and {shown(wrong)} is none")
    if not isinstance(value, Mapping):
        raise FieldError(f"must be a path, a list of paths, or a mapping with the key task, {example}")
    if "task" not in value:
        raise FieldError(f"a mapping needs the key path, or the key task, {example}")
    if not isinstance(value["task"], str) or not value["task"]:
        raise FieldError(f"task is {shown(value['task'])}; it must be the name of a task, such as shapes")
    source = _plain(value)
    for key, inner in source.items():
        if any(isinstance(item, dict | list) for item in (inner if isinstance(inner, list) else [inner])):
            raise FieldError(f"{key} is {shown(inner)}; a task is set by single values and lists of them")
    return source


def _set(value: Any) -> str | list[Any] | dict[str, Any]:
    """The source of an evaluation set."""
    source = _source(value)
    if any(isinstance(each, dict) and "path" in each and "weight" in each for each in _listed(source)):
        raise FieldError("weight is for data.train; an evaluation answers every row once: leave it out")
    return source


def _listed(source: Any) -> list[Any]:
    return source if isinstance(source, list) else [source]


def _sources(value: Any) -> str | list[Any] | dict[str, Any]:
    """One source, or a mapping of set names to sources; the first set is the headline."""
    if not isinstance(value, Mapping) or is_source(value):
        return _set(value)
    if not value:
        raise FieldError("names no set; write null for no evaluation")
    sets: dict[str, Any] = {}
    for name, source in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise FieldError(f"the name of a set is letters, digits, '_', '-' and '.'; {shown(name)} is not")
        try:
            sets[name] = _set(source)
        except FieldError as error:
            raise FieldError(f"the set {name} is {shown(source)}: {error}") from None
    return sets


def _reward(value: Any) -> str | dict[str, Any]:
    """The name of a reward, or a mapping with a name, maybe a weight, and arguments."""
    if isinstance(value, str) and value:
        return str(_path(value) if ".py:" in value else value)
    if callable(value):
        raise FieldError("a Python function goes to GRPOTrainer(config, rewards=[...]), not into the config")
    if not isinstance(value, Mapping):
        raise FieldError("must be the name of a reward, or a mapping such as {name: iou, weight: 1.0}")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise FieldError("a mapping needs the key name, such as {name: iou, weight: 1.0}")
    entry = _plain(value)
    entry["name"] = _reward(entry["name"])
    if "weight" in entry:
        weight = _number(entry["weight"])
        if not is_number(weight):
            raise FieldError(f"weight is {shown(weight)}; it must be a finite number")
        entry["weight"] = float(weight)
    return entry


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(plain(value))
    except TypeError as error:
        raise FieldError(f"holds {error}") from None
    except RecursionError:
        raise FieldError("contains itself, or is nested too deep; a config file could not hold it") from None


def _scale(value: Any) -> Any:
    return ("group" if value else "none") if isinstance(value, bool) else value


def _action(value: Any) -> Any:
    return "off" if value is False else value  # PyYAML reads `off` as false


def _profile(value: Any) -> bool | int | str:
    if value == "torch" or isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value  # type: ignore[no-any-return]
    raise FieldError("must be true, false, torch, or an integer >= 1, the steps of the trace")


PathText = Annotated[str, BeforeValidator(_path), Field(min_length=1), Accepts("a path")]
Number = Annotated[float, BeforeValidator(_number), AfterValidator(_bounded)]
Source = Annotated[
    str | list[Any] | dict[str, Any],
    PlainValidator(_source),
    Accepts(
        "a path, a list of paths, a mapping with the key task, or a list of entries {path: ..., weight: ...}"
    ),
]
Sources = Annotated[
    str | list[Any] | dict[str, Any],
    PlainValidator(_sources),
    Accepts(
        "a path, a list of paths, a mapping with the key task, a list of entries {path: ...}, or a mapping of set "
        "names to those"
    ),
]
HeadlineText = Annotated[
    str | None,
    PlainValidator(_headline),
    Accepts(
        "a reward and its least mark, such as exact_match >= 1, a reward and mean, such as iou mean, or null"
    ),
]
ProfileChoice = Annotated[
    bool | int | str, PlainValidator(_profile), Accepts("true, false, torch or an integer >= 1")
]
RewardEntry = Annotated[str | dict[str, Any], PlainValidator(_reward)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Accepts("auto, cpu, cuda or cuda:N")]
GuardName = Literal[
    "duplicate_completions", "logp_gap", "update_happens", "no_update", "zero_std", "no_reward", "zero_kl",
    "masked_share", "entropy_collapse", "clipped_lengths", "unread_images", "sight_lost",
    "tools_failing", "tools_unused",
]  # fmt: skip
GuardAction = Annotated[Literal["stop", "warn", "off"], BeforeValidator(_action)]
ScaleRewards = Annotated[Literal["group", "batch", "none"], BeforeValidator(_scale)]
