"""Kinds of value that the config's fields hold, as annotated types.

A kind that pydantic cannot check by its type alone has a function here that takes the value of a file and returns the
config's, or raises FieldError with the words that follow the field's name. `Accepts` are the words for what a field
accepts. The fields themselves are in `sections`, sources of rows in `source_entries`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StringConstraints

from mm_grpo.config.messages import Accepts, FieldError, shown
from mm_grpo.files import expand_home
from mm_grpo.numbers import is_number


def _path(value: Any) -> Any:
    """Return a path as text, with the home folder in place of `~`; other values as they are."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        return expand_home(value) if isinstance(value, str) else value
    except ValueError as error:
        raise FieldError(str(error)) from None


def _number(value: Any) -> Any:
    """Return the number in a text such as `1e-6`, which PyYAML reads as a text; other values as they are."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        return float(value)
    return value


def _prompt(value: str) -> str:
    is_file = os.path.isfile(value) or value.endswith((".txt", ".md", ".jinja", ".jinja2", ".prompt"))
    if is_file and not re.search(r"\s", value):
        raise FieldError("is the name of a file, and the model would get that name; write the text itself")
    return value


def _template(value: str) -> str:
    with suppress(ValueError):
        parts = [part for part in Formatter().parse(value) if part[1] is not None]
        if parts and all(name and not spec and not conversion for _, name, spec, conversion in parts):
            return value
    raise FieldError("must hold names of columns in braces, and {{ and }} for braces of the text itself")


def path_text(value: Any) -> str:
    """Return a non-empty path string; raise ValueError otherwise."""
    path = _path(value)
    if not isinstance(path, str) or not path:
        raise ValueError
    return path


def _reward(value: Any) -> str | dict[str, Any]:
    """Return a reward's name, or a mapping with a name, maybe a weight, and arguments."""
    if isinstance(value, str) and value:
        return str(_path(value) if ".py:" in value else value)
    if callable(value):
        raise FieldError("a Python function goes to GRPOTrainer(config, rewards=[...]), not into the config")
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError
    entry = plain_mapping(value)
    entry["name"] = _reward(entry["name"])
    if "weight" in entry:
        weight = _number(entry["weight"])
        if not is_number(weight):
            raise FieldError(f"weight is {shown(weight)}; it must be a finite number")
        entry["weight"] = float(weight)
    return entry


def is_source(value: Mapping[str, Any]) -> bool:
    """Return True if a mapping is one source of rows (an entry or a task), and not several sets by name."""
    return "path" in value or "task" in value


def plain(value: Any) -> Any:
    """Return a copy made of dict, list, str, int, float, bool and None only; TypeError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in (str, int, float):  # subclasses too, such as numbers of numpy
        if isinstance(value, kind) and value == value:
            return kind(value)
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{shown(odd[0])} as a key, which must be text")
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    raise TypeError(f"{shown(value)}, which a config file cannot hold")


def plain_mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that a config file can hold; FieldError if there is none."""
    try:
        return dict(plain(value))
    except TypeError as error:
        raise FieldError(f"holds {error}") from None


def _scale(value: Any) -> Any:
    return ("group" if value else "none") if isinstance(value, bool) else value


PathText = Annotated[str, BeforeValidator(_path), Field(min_length=1), Accepts("a path")]
Number = Annotated[float, BeforeValidator(_number)]
_MARK = "a reward and its least mark, such as exact_match >= 1, a reward and mean, such as iou mean, or null"
_Headline = StringConstraints(
    strip_whitespace=True, pattern=r"^\S.*(>=\s*[-+]?(\d{1,18}(\.\d*)?|\.\d+)|\smean)$"
)
HeadlineText = Annotated[Annotated[str, _Headline] | None, Accepts(_MARK)]
RewardEntry = Annotated[
    str | dict[str, Any],
    PlainValidator(_reward),
    Accepts("the name of a reward, or a mapping with a name such as {name: iou, weight: 1.0}"),
]
PromptText = Annotated[str, AfterValidator(_prompt), Accepts("text")]
Template = Annotated[
    str,
    AfterValidator(_template),
    Accepts("text with names of columns in braces, as in Where is the {category}?"),
]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Accepts("auto, cpu, cuda or cuda:N")]
GuardName = Literal[
    "duplicate_completions", "logp_gap", "update_happens", "no_update", "zero_std", "no_reward", "zero_kl",
    "masked_share", "entropy_collapse", "clipped_lengths", "unread_images", "sight_lost", "tools_failing",
    "tools_unused", "phantom_advantage",
]  # fmt: skip
GuardAction = Literal["stop", "warn", "off"]
ScaleRewards = Annotated[Literal["group", "batch", "none"], BeforeValidator(_scale)]
