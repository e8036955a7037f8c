"""Words of messages about the config: how a value, a default and a type read."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from mm_grpo.errors import shorten


@dataclass(frozen=True)
class Accepts:
    """Words in an annotation, to follow "must be": what `describe_type` cannot read from the type and its bounds."""

    text: str


class FieldError(ValueError):
    """Error of a validator about the value of one field; the text follows `path = value: `."""


class CheckError(ValueError):
    """Error about fields that contradict each other; the text is the whole line, or lines."""


def shown(value: object, limit: int = 80) -> str:
    """Return a value as an error message shows it: short, on one line."""
    try:
        return shorten("null" if value is None else repr(value), limit)
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"a {type(value).__name__} of too many digits"


def yaml_repr(value: Any) -> str:
    """Return a default as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe_type(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """Say what a type with its bounds accepts: "an integer >= 0", "one of group, batch, none"."""
    if get_origin(annotation) is Annotated:
        base, *inner = get_args(annotation)
        return describe_type(base, (*inner, *metadata))
    for marker in metadata:
        if isinstance(marker, Accepts):
            return marker.text
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [describe_type(kind, metadata) for kind in arguments if kind is not type(None)]
        return " or ".join([*kinds, "null"] if type(None) in arguments else kinds)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (list, tuple):
        return f"a list of {describe_type(arguments[0]).removeprefix('one of ')}"
    if origin is dict:
        return f"a mapping of names to {describe_type(arguments[1])}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", Any: "values"}
    signs = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}
    limits = [(bound, *signs[type(bound)]) for bound in metadata if type(bound) in signs]
    bounds = [f"{sign} {getattr(bound, name)}" for bound, name, sign in limits]
    return f"{names[annotation]} {' and '.join(bounds)}".rstrip()
