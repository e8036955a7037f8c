"""The kinds of value that a config field can hold beyond plain numbers and texts.

Each is a type for an annotation: paths, numbers that YAML left as texts, data sources, entries of
`rewards`, guards. The functions say what is legal; the types at the end tie them to pydantic.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from mm_grpo.config_load import plain, shown
from mm_grpo.config_section import Legal, mistake


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _number(value: Any) -> Any:
    """PyYAML reads `1e-6` as a text; a mapping that it loaded may still hold one."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        return float(value)
    return value


def _source(value: Any) -> str | dict[str, Any]:
    """A data source: a path or dataset name, or a mapping whose `task` names a built-in task."""
    value = _path(value)
    if isinstance(value, str) and value:
        return str(value)
    if not isinstance(value, Mapping):
        raise mistake(
            "must be a path, or a mapping with the key task, such as {task: shapes, split: train, size: 2000}"
        )
    if "task" not in value:
        raise mistake("a mapping needs the key task, such as {task: shapes, split: train, size: 2000}")
    if not isinstance(value["task"], str) or not value["task"]:
        raise mistake(f"task is {shown(value['task'])}; it must be the name of a task, such as shapes")
    source: dict[str, Any] = _plain(value)
    for key, inner in source.items():
        if any(isinstance(item, dict | list) for item in (inner if isinstance(inner, list) else [inner])):
            raise mistake(f"{key} is {shown(inner)}; a task is set by single values and lists of them")
    return source


def _evaluation(value: Any) -> str | dict[str, Any]:
    """One source, or a mapping of set names to sources; the first set is the headline."""
    if not isinstance(value, Mapping) or "task" in value:
        return _source(value)
    if not value:
        raise mistake("names no set; write null for no evaluation")
    sets: dict[str, Any] = {}
    for name, source in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise mistake(f"the name of a set is letters, digits, '_', '-' and '.'; {shown(name)} is not")
        try:
            sets[name] = _source(source)
        except PydanticCustomError as error:
            raise mistake(f"the set {name} is {shown(source)}: {error.message()}") from None
    return sets


def _reward(value: Any) -> str | dict[str, Any]:
    """One entry of `rewards`: a name, or a mapping with a name, maybe a weight, and arguments."""
    if isinstance(value, str) and value:
        return str(value)
    if callable(value):
        raise mistake("a Python function goes to GRPOTrainer(config, rewards=[...]), not into the config")
    if not isinstance(value, Mapping):
        raise mistake("must be the name of a reward, or a mapping such as {name: iou, weight: 1.0}")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise mistake("a mapping needs the key name, such as {name: iou, weight: 1.0}")
    entry: dict[str, Any] = _plain(value)
    if "weight" in entry:
        weight = _number(entry["weight"])
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise mistake(f"weight is {shown(weight)}; it must be a finite number")
        entry["weight"] = float(weight)
    return entry


def _plain(value: Any) -> Any:
    try:
        return plain(value)
    except TypeError as error:
        raise mistake(f"holds {error}") from None


def _scale(value: Any) -> Any:
    if value == "gdpo":  # ms-swift's name for it
        raise mistake(
            "must be one of group, batch, none; write algorithm.multi_objective_aggregation: normalize_then_sum"
        )
    return ("group" if value else "none") if isinstance(value, bool) else value


def _action(value: Any) -> Any:
    return "off" if value is False else value  # PyYAML reads `off` as false


PathText = Annotated[str, BeforeValidator(_path), Field(min_length=1), Legal("a path")]
Number = Annotated[float, BeforeValidator(_number)]
Source = Annotated[
    str | dict[str, Any], PlainValidator(_source), Legal("a path or a mapping with the key task")
]
EvalSource = Annotated[
    str | dict[str, Any],
    PlainValidator(_evaluation),
    Legal("a path, a mapping with the key task, or a mapping of set names to those"),
]
RewardEntry = Annotated[str | dict[str, Any], PlainValidator(_reward)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Legal("auto, cpu, cuda or cuda:N")]
GuardName = Literal["duplicate_completions", "logp_gap", "update_happens"]
GuardAction = Annotated[Literal["stop", "warn", "off"], BeforeValidator(_action)]
ScaleRewards = Annotated[Literal["group", "batch", "none"], BeforeValidator(_scale)]
