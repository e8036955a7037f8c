"""`Section`, the base of every part of the config; its fields by path, and its errors as ConfigError.

However a section is made (keywords, a mapping, a file), each of pydantic's errors becomes one line such as
`run.seed = 'abc': must be an integer >= 0`, and all lines of one attempt are raised together as one
ConfigError.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from mm_grpo.config.messages import CheckError, FieldError, describe_type, shown
from mm_grpo.config.yaml_file import set_value
from mm_grpo.errors import ConfigError, half_character, nearest
from mm_grpo.migrate.keys import VALUES, unknown_key

MOST_BITS = 10_000
"""Longest integer, some 3000 digits."""


class RelativeToFile:
    """Marks a field whose relative paths are looked for beside the config file first."""


class Essential:
    """Marks a field that most runs set; `mm-grpo config`, docs/config.md and `mm-grpo init` show it first."""


class Section(BaseModel):
    """Base of every part of the config. `where` is its dotted path in the tree.

    A section is frozen; `with_values` makes a changed copy. Lists and mappings in it can still be changed:
    `GRPOConfig.check` checks them again.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    where: ClassVar[str] = ""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise as_config_error(type(self), error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        path = f"{self.where}.{name}".lstrip(".")
        raise ConfigError(f"{path}: is fixed; config.with_values({{{path!r}: ...}}) makes a changed copy")

    # pydantic would otherwise call this constructor for a section inside another one, and the first
    # section with an error would hide the errors of the others
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            _refuse_unwritable(obj, cls.where)
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise as_config_error(cls, error) from None

    @classmethod
    def all_paths(cls) -> list[str]:
        """Return the dotted path of every field of the tree that holds this section."""
        trees = [[path for path, _ in leaves(kind)] for kind in Section.__subclasses__()]
        branch = {path for path, _ in leaves(cls)}
        return max((tree for tree in trees if branch <= {*tree}), key=len, default=[*branch])

    def flat(self) -> dict[str, Any]:
        """Return the value of every field below this section by its dotted path, as `model_dump` has it."""
        flat: dict[str, Any] = {}
        for name, value in self.model_dump().items():
            inner = getattr(self, name)
            is_section = section_of(type(self).model_fields[name]) is not None
            flat |= inner.flat() if is_section else {_join(self.where, name): value}
        return flat

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with `{"a.b": value}` laid over it, checked as a new one is. Paths start at this section."""
        tree = self.model_dump()
        for path, value in values.items():
            set_value(tree, path.split("."), value, path)
        return self.model_validate(tree)


def help_text(field: FieldInfo) -> str:
    """Return a field's docstring on one line."""
    return " ".join((field.description or "").split())


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class that a field holds, or None when it is a leaf."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def leaves(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted path and the field of every leaf, in the order of the file.

    A section that may be null, or one of several, is a leaf itself, and its own leaves follow it, each once. A key with
    one legal value says which section it is, and is no leaf.
    """
    for name, field in section.model_fields.items():
        is_tag = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if section_of(field) is None and not is_tag:
            yield _join(section.where, name), field
        yield from {path: leaf for kind in _sections_within(field) for path, leaf in leaves(kind)}.items()


def as_config_error(cls: type[Section], error: ValidationError) -> ConfigError:
    """Turn pydantic's errors about the section `cls` into one ConfigError, a line for each."""
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
        return unknown_key(path, value, cls.all_paths())
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
    # misspellings only: a text that is only somewhat alike is mostly meant as something else
    choice = nearest(value, _choices(field.annotation), 0.75) if isinstance(value, str) else None
    advice = VALUES.get(path.partition("[")[0], {}).get(str(value).casefold())
    hint = f"; {advice}" if advice else f" (the nearest is {choice})" if choice else ""
    subject = path if "[key]" in location else f"{path} = {shown(value)}"
    return [f"{subject}: must be {describe_type(field.annotation, field.metadata)}{hint}"]


def _refuse_unwritable(value: Any, path: str) -> None:
    """Raise ConfigError for a value that no config file can hold: half a character, a number of too many digits."""
    if isinstance(value, str) and (half := half_character(value)):
        raise ConfigError(f"{path} = {shown(value)}: {half}")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ConfigError(f"{path} = {shown(value)}: must have at most {MOST_BITS} bits")
    items = value.items() if isinstance(value, Mapping) else ()
    for key, inner in enumerate(value) if isinstance(value, list | tuple) else items:
        _refuse_unwritable(inner, _join(path, str(key)))


def _field(cls: type[Section], location: Sequence[Any]) -> tuple[FieldInfo | None, Sequence[Any]]:
    """Return the leaf or section that a location names or leads into, and the location cut there.

    pydantic reports an error for each member of a union, and adds the member to the location.
    """
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
    """Return the section classes that a field may hold."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
