"""`Section`: a pydantic model whose mistakes are told in this project's words.

However a section is made or changed (keywords, a mapping, an assignment), each mistake becomes one
line such as `run.seed = 'abc': must be an integer >= 0`, and all lines of one attempt are raised
together as one ConfigError. An assignment that fails changes nothing.

A validator that has more to say raises `mistake(text)`, which is put behind `path = value: `, or
`line(text)`, which is the whole line. `Legal("...")` in an annotation says in words what `legal`
cannot read from the type and its bounds.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from mm_grpo.config_load import shown
from mm_grpo.config_names import nearest, unknown_key
from mm_grpo.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Legal:
    """What a field accepts, in words that follow "must be"."""

    text: str


def mistake(text: str) -> PydanticCustomError:
    """An error whose line is `path = value: text`."""
    return PydanticCustomError("mistake", "{text}", {"text": text})


def line(text: str) -> PydanticCustomError:
    """An error whose line, or lines, are `text` and nothing else."""
    return PydanticCustomError("line", "{text}", {"text": text})


class Section(BaseModel):
    """Base of every part of the config. `where` is its dotted path in the tree."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False)

    where: ClassVar[str] = ""
    legal_paths: ClassVar[Sequence[str]] = ()
    """Every field of the whole tree, dotted; the tree's root sets it once for all sections."""

    def __init__(self, /, **values: Any) -> None:
        _told(type(self), lambda: super(Section, self).__init__(**values))

    # pydantic would otherwise call this constructor for a section inside another one, and the first
    # section with a mistake would hide the mistakes of the others.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        return _told(cls, lambda: super(Section, cls).model_validate(obj, **options))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in type(self).model_fields:
            raise ConfigError("\n".join(unknown_key(_join(self.where, name), value, self.legal_paths)))
        before = dict(self.__dict__)
        try:
            _told(type(self), lambda: super(Section, self).__setattr__(name, value))
        except ConfigError:
            # A check of the whole section runs after pydantic has stored the value.
            object.__setattr__(self, "__dict__", before)
            raise

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        """A section whose every line is commented out is null in YAML."""
        return {} if value is None else value


def setting(default: Any, what: str, note: str = "", **bounds: float) -> Any:
    """A field: its default (`...` when it has none, a type for a new one each time) and its help text.

    `bounds` are pydantic's `ge`, `gt`, `le` and `lt`.
    """
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    span = " and ".join(f"{signs[name]} {bound}" for name, bound in bounds.items())
    text = what + (f", {span}" if span else "") + (f"; {note}" if note else "") + ". "
    if default is ...:
        return Field(description=f"{text}Required.", **cast(Any, bounds))
    if isinstance(default, type):
        shown_default = f"Default: {written(default())}." if default in (dict, list) else ""
        return Field(default_factory=default, description=f"{text}{shown_default}".rstrip())
    return Field(default, description=f"{text}Default: {written(default)}.", **cast(Any, bounds))


def written(value: Any) -> str:
    """A default as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def legal(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """What a type with its bounds accepts, in words: "an integer >= 0", "one of group, batch, none"."""
    if get_origin(annotation) is Annotated:
        base, *inner = get_args(annotation)
        return legal(base, (*inner, *metadata))
    for marker in metadata:
        if isinstance(marker, Legal):
            return marker.text
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [legal(kind, metadata) for kind in arguments if kind is not type(None)]
        return " or ".join([*kinds, "null"] if type(None) in arguments else kinds)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is list:
        return f"a list of {legal(arguments[0]).removeprefix('one of ')}"
    if origin is dict:
        return f"a mapping of names to {legal(arguments[1])}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", Any: "values"}
    signs: dict[type, Callable[[Any], str]] = {
        Ge: lambda bound: f">= {bound.ge}",
        Gt: lambda bound: f"> {bound.gt}",
        Le: lambda bound: f"<= {bound.le}",
        Lt: lambda bound: f"< {bound.lt}",
    }
    bounds = [signs[type(bound)](bound) for bound in metadata if type(bound) in signs]
    return f"{names[annotation]} {' and '.join(bounds)}".rstrip()


def help_text(field: FieldInfo) -> str:
    return field.description or ""


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class that a field holds, or None when it is a leaf."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def section_within(field: FieldInfo) -> type[Section] | None:
    """The section class that a field holds, or may hold in place of null."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def leaves(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """The dotted path and the field of every leaf, in the order of the file.

    A section that may be null is a leaf itself, and its own leaves follow it.
    """
    for name, field in section.model_fields.items():
        inner = section_within(field)
        if section_of(field) is None:
            yield _join(section.where, name), field
        if inner is not None:
            yield from leaves(inner)


def _told(cls: type[Section], action: Callable[[], T]) -> T:
    try:
        return action()
    except ValidationError as error:
        told = [line for problem in error.errors(include_url=False) for line in _lines(cls, problem)]
    raise ConfigError("\n".join(dict.fromkeys(told)))


def _lines(cls: type[Section], problem: Mapping[str, Any]) -> list[str]:
    kind, value, location = problem["type"], problem["input"], problem["loc"]
    if kind == "line":
        return [str(problem["msg"])]
    path = cls.where
    for part in location:
        if part != "[key]":
            is_item = isinstance(part, int) and kind != "invalid_key"
            path = f"{path}[{part}]" if is_item else _join(path, str(part))
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown_key(path, value, cls.legal_paths)
    if kind == "mistake":
        return [f"{path} = {shown(value)}: {problem['msg']}"]
    field, rest = _field(cls, location)
    if field is None:
        return [f"{path or 'the config'} = {shown(value)}: must be a mapping of sections"]
    inner = section_of(field)
    if kind == "missing":
        needed = [path] if inner is None else [p for p, leaf in leaves(inner) if leaf.is_required()]
        return [f"{name} is missing: {_described(cls, name)}" for name in needed]
    if inner is not None:
        keys = ", ".join(f"{path}.{key}" for key in inner.model_fields)
        return [f"{path} = {shown(value)}: must be a section; its keys are {keys}"]
    annotation = _item(field.annotation, rest)
    allowed = legal(annotation, () if rest else field.metadata)
    if "[key]" in rest:
        found = nearest(str(value), _choices(annotation))
        return [f"{path}: unknown name; {f'the nearest is {found}; ' if found else ''}must be {allowed}"]
    single = isinstance(value, str) and kind not in ("list_type", "dict_type")
    found = nearest(value, _choices(annotation)) if single else None
    return [f"{path} = {shown(value)}: must be {allowed}{f' (the nearest is {found})' if found else ''}"]


def _field(cls: type[Section], location: Sequence[Any]) -> tuple[FieldInfo | None, Sequence[Any]]:
    """The leaf or section field that a location names, and what of the location is inside its value."""
    field: FieldInfo | None = None
    here: type[Section] | None = cls
    for depth, part in enumerate(location):
        if here is None or part not in here.model_fields:
            return field, location[depth:]
        field = here.model_fields[part]
        here = section_within(field)
    return field, ()


def _item(annotation: Any, rest: Sequence[Any]) -> Any:
    """The type of the item that `rest` reaches inside a list or a mapping."""
    if get_origin(annotation) is list and rest:
        return get_args(annotation)[0]
    if get_origin(annotation) is dict and rest:
        return get_args(annotation)[0 if "[key]" in rest else 1]
    return annotation


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _described(cls: type[Section], path: str) -> str:
    return next(
        (help_text(field).removesuffix(" Required.") for name, field in leaves(cls) if name == path), ""
    )


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
