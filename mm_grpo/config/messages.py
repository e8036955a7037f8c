"""`Section`, the base of every part of the config, and how pydantic's errors become this project's messages.

However a section is made (keywords, a mapping, a file), each error becomes one line such as
`run.seed = 'abc': must be an integer >= 0`, and all lines of one attempt are raised together as one
ConfigError.

A validator that has more to say raises FieldError(text), which is put behind `path = value: `, or
CheckError(text), which is the whole line. `Accepts("...")` in an annotation says in words what
`describe_type` cannot read from the type and its bounds.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from mm_grpo.config.yaml_file import set_value, shown
from mm_grpo.errors import ConfigError, half_character, nearest
from mm_grpo.migrate.keys import VALUES, unknown_key


@dataclass(frozen=True)
class Accepts:
    """What a field accepts, in words that follow "must be"."""

    text: str


MOST_BITS = 10_000
"""Of a number, some 3000 digits."""


class RelativeToFile:
    """Marks a field whose relative paths are looked for beside the config file first."""


class FieldError(ValueError):
    """A value that its field does not accept; the text follows `path = value: `."""


class CheckError(ValueError):
    """Fields that do not go together; the text is the whole line, or lines."""


class Section(BaseModel):
    """Base of every part of the config. `where` is its dotted path in the tree.

    Nothing is assigned to a section; `with_values` makes a changed copy. (What a list or a mapping in it
    holds can still be changed: `GRPOConfig.check` looks at it again.)
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    where: ClassVar[str] = ""
    all_paths: ClassVar[Sequence[str]] = ()
    """Every field of the whole tree, dotted; the tree's root sets it once for all sections."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise as_config_error(type(self), error) from None

    # pydantic would otherwise call this constructor for a section inside another one, and the first
    # section with an error would hide the errors of the others.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            _refuse_unwritable(obj, cls.where)
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise as_config_error(cls, error) from None

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy with `{"a.b": value}` laid over it, checked as a new one is. Paths start at this section."""
        tree = self.model_dump()
        for path, value in values.items():
            set_value(tree, path.split("."), value, path)
        return self.model_validate(tree)


def yaml_repr(value: Any) -> str:
    """A default as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe_type(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """What a type with its bounds accepts, in words: "an integer >= 0", "one of group, batch, none"."""
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
    known = [(bound, *signs[type(bound)]) for bound in metadata if type(bound) in signs]
    bounds = [f"{sign} {getattr(bound, name)}" for bound, name, sign in known]
    return f"{names[annotation]} {' and '.join(bounds)}".rstrip()


def help_text(field: FieldInfo) -> str:
    """A field's docstring on one line."""
    return " ".join((field.description or "").split())


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class that a field holds, or None when it is a leaf."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def leaves(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """The dotted path and the field of every leaf, in the order of the file.

    A section that may be null, or one of several, is a leaf itself, and its own leaves follow it, each once. A key with
    one legal value says which section it is, and is no leaf.
    """
    for name, field in section.model_fields.items():
        is_tag = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if section_of(field) is None and not is_tag:
            yield _join(section.where, name), field
        yield from {path: leaf for kind in _sections_within(field) for path, leaf in leaves(kind)}.items()


def as_config_error(cls: type[Section], error: ValidationError) -> ConfigError:
    """pydantic's errors about the section `cls` as one ConfigError, a line for each."""
    lines = [line for problem in error.errors(include_url=False) for line in _lines(cls, problem)]
    return ConfigError("\n".join(dict.fromkeys(lines)))


def _lines(cls: type[Section], problem: Mapping[str, Any]) -> list[str]:
    kind, value = problem["type"], problem["input"]
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, CheckError):
        return [str(raised)]
    field, location = _field(cls, problem["loc"])
    path = cls.where
    for part in location:
        if part != "[key]":
            is_item = isinstance(part, int) and kind != "invalid_key"
            path = f"{path}[{part}]" if is_item else _join(path, str(part))
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown_key(path, value, cls.all_paths)
    if isinstance(raised, FieldError):
        return [f"{path} = {shown(value)}: {raised}"]
    if field is None:
        return [f"{path or 'the config'} = {shown(value)}: must be a mapping of sections"]
    inner = section_of(field)
    if kind == "missing":
        within = [leaf for leaf in leaves(inner) if leaf[1].is_required()] if inner is not None else []
        needed = [(path, field)] if inner is None else within
        return [f"{name} is missing: {help_text(leaf).removesuffix(' Required.')}" for name, leaf in needed]
    if inner is not None:
        keys = ", ".join(f"{path}.{key}" for key in inner.model_fields)
        return [f"{path} = {shown(value)}: must be a section; its keys are {keys}"]
    # a slip of a finger: what looks only somewhat alike is mostly another thing
    found = nearest(value, _choices(field.annotation), 0.75) if isinstance(value, str) else None
    advice = VALUES.get(path.partition("[")[0], {}).get(str(value).casefold())
    hint = f"; {advice}" if advice else f" (the nearest is {found})" if found else ""
    given = path if "[key]" in location else f"{path} = {shown(value)}"
    return [f"{given}: must be {describe_type(field.annotation, field.metadata)}{hint}"]


def _refuse_unwritable(value: Any, path: str) -> None:
    """Raise ConfigError for what no config file holds: half a character, and more digits than Python writes."""
    if isinstance(value, str) and (half := half_character(value)):
        raise ConfigError(f"{path} = {shown(value)}: {half}")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ConfigError(f"{path} = {shown(value)}: must have at most {MOST_BITS} bits")
    items = value.items() if isinstance(value, Mapping) else ()
    for key, inner in enumerate(value) if isinstance(value, list | tuple) else items:
        _refuse_unwritable(inner, _join(path, str(key)))


def _field(cls: type[Section], location: Sequence[Any]) -> tuple[FieldInfo | None, Sequence[Any]]:
    """The leaf or section that a location names, or leads into; and the location without the members of a union, each
    of which pydantic tells a fault of."""
    field: FieldInfo | None = None
    here: type[Section] | None = cls
    for depth, part in enumerate(location):
        if here is None or part not in here.model_fields:
            kinds = {*get_args(field.annotation)} - {type(None)} if field is not None else ()
            is_union = field is not None and get_origin(field.annotation) in (Union, types.UnionType)
            return field, location[:depth] if is_union and len(kinds) > 1 else location
        field = here.model_fields[part]
        here = next(iter(_sections_within(field)), None)
    return field, location


def _sections_within(field: FieldInfo) -> list[type[Section]]:
    """The section classes that a field may hold."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
