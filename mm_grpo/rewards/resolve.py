"""Turn an entry of the config's `rewards` list into a `RewardSpec`, and describe its code for a saved config.

An entry is a registered or built-in name, `path/to/file.py:function`, `package.module:function`, the
name of an entry point in the group `mm_grpo.rewards`, a callable, or a mapping
`{name: <any of those>, weight: 0.5, as: other_name, threshold: 0.5}`. To add another form, add a branch
in `_find`.

In a mapping `name`, `weight`, `as` and the fields of `RewardOptions` are reserved. Every other key is bound to the
parameter of that name, of the function or of a class's constructor. A class is called once, and the object it makes is
the reward.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from mm_grpo.config.messages import describe_type
from mm_grpo.errors import RewardError, did_you_mean
from mm_grpo.files import expand_home
from mm_grpo.import_path import (
    FILE_MODULE,
    address_in_module,
    import_failed,
    in_this_process_alone,
    load_named,
)
from mm_grpo.rewards import registry
from mm_grpo.rewards.options import KEYS, read_options
from mm_grpo.rewards.spec import RewardSpec, check_name, check_weight, innermost, make_spec

GROUP = "mm_grpo.rewards"
RESERVED_KEYS = ("name", "weight", "as", *KEYS)

Entry = str | Mapping[str, Any] | Callable[..., Any] | RewardSpec


def resolve_entries(entries: Iterable[Entry]) -> list[RewardSpec]:
    """Resolve a whole list. Raise RewardError if it is empty or two entries have one name."""
    if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
        raise RewardError(f"rewards is {entries!r}; it must be a list, such as [exact_match, my_function]")
    specs = [resolve_entry(entry) for entry in entries]
    if not specs:
        raise RewardError(f"rewards is empty; it needs at least one of: {', '.join(registry.names())}")
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"rewards: two entries are named {name!r}; rename one: {{name: ..., as: ...}}")
    return specs


def resolve_entry(entry: Entry) -> RewardSpec:
    """Return the spec of one entry."""
    if not isinstance(entry, Mapping):
        return _find(entry, {})
    if "name" not in entry:
        raise RewardError(f"rewards: the entry {dict(entry)!r} has no `name`; add it")
    bound = {key: value for key, value in entry.items() if key not in RESERVED_KEYS}
    spec = _renamed(_find(entry["name"], bound), entry.get("as"))
    bound = {key: value for key, value in bound.items() if key not in spec.made_with}
    for key, value in bound.items():
        if key not in spec.settable:
            raise RewardError(_unknown_key(spec, str(key)))
        _check_kind(spec, key, value)
    options = read_options(spec.name, {k: v for k, v in entry.items() if k in KEYS}, spec.options)
    options.check_kind(spec.name, is_async=spec.is_async, kind=spec.kind)
    weight = check_weight(spec.name, entry.get("weight", spec.weight))
    return dataclasses.replace(spec, weight=weight, bound={**spec.bound, **bound}, options=options)


def gate_levels(specs: Sequence[RewardSpec]) -> list[list[RewardSpec]]:
    """Return the rewards in the order of their gates: each level waits for those before it."""
    names = [spec.name for spec in specs]
    for spec in specs:
        for gate in spec.options.only_if:
            if gate not in names or gate == spec.name:
                hint = did_you_mean(gate, [n for n in names if n != spec.name])
                listed = f"no other reward of the list; {hint}its rewards: {', '.join(names)}"
                raise RewardError(f"reward {spec.name!r}: only_if is {gate!r}, which is {listed}")
    levels: list[list[RewardSpec]] = []
    placed: set[str] = set()
    while waiting := [spec for spec in specs if spec.name not in placed]:
        level = [spec for spec in waiting if placed.issuperset(spec.options.only_if)]
        if not level:
            raise RewardError(
                f"rewards: only_if goes in a circle among {', '.join(spec.name for spec in waiting)}"
            )
        levels.append(level)
        placed.update(spec.name for spec in level)
    return levels


def describe_code(fn: Callable[..., Any]) -> dict[str, str | None]:
    """Return the module, qualified name and source's SHA-256 of a user's function or class, as a saved config has them.

    The digest is None if Python has no source. A closure's values and a partial's arguments are not part of it. Of a
    path/to/file.py:function, which may call its neighbours, `file_sha256` is that of the whole file; else None.
    """
    inner = innermost(fn)
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    try:
        source = inspect.getsource(inner)
    except (OSError, TypeError):
        digest = None
    else:
        digest = hashlib.sha256(source.encode()).hexdigest()
    module, file_digest = inner.__module__, None
    if module.startswith(FILE_MODULE) and (file := sys.modules[module].__file__):
        # the rest of that name depends on where the file lies
        module, file_digest = Path(file).stem, hashlib.sha256(Path(file).read_bytes()).hexdigest()
    identity = {"module": module, "qualname": inner.__qualname__, "sha256": digest}
    return identity | {"file_sha256": file_digest}


def entry_point_names() -> list[str]:
    """Return the names that installed packages offer in the group `mm_grpo.rewards`, sorted."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=GROUP)})


def _find(reward: Any, settings: Mapping[str, Any]) -> RewardSpec:
    """Return the spec of a name, address, function or class; `settings` of the entry go to a class's constructor."""
    if isinstance(reward, RewardSpec):
        return reward
    if callable(reward):
        return _from_function(reward, "callable", None, settings)
    if not isinstance(reward, str):
        raise RewardError(
            f"rewards: {reward!r} is not a reward; legal are a name, path/to/file.py:function, "
            f"package.module:function, a function, or a mapping with `name`"
        )
    if ":" in reward:
        return _from_address(reward, settings)
    if reward.endswith(".py"):
        raise RewardError(f"rewards: {reward!r} names a file; name a function in it too: {reward}:function")
    if reward not in registry.names():
        return _from_entry_point(reward, settings)
    spec = registry.get(reward)
    if spec.source == "built-in":
        from mm_grpo.rewards.builtins import require

        require(spec.name)  # a missing package is an error now, not after a rollout
    return spec


def _renamed(spec: RewardSpec, alias: str | None) -> RewardSpec:
    if alias is None:
        return spec
    check_name(alias)
    return dataclasses.replace(spec, name=alias)


def _from_function(
    fn: Callable[..., Any], source: str, address: str | None, settings: Mapping[str, Any]
) -> RewardSpec:
    """Return the spec of a function, with the options of its decorator; a class is instantiated first."""
    registered = registry.registered_as(fn)
    made_with: dict[str, Any] = {}
    if registered is None and inspect.isclass(fn):
        address = address or address_in_module(fn)
        fn, made_with = _instantiate(fn, source, settings)
    return dataclasses.replace(
        registered or make_spec(fn), source=source, address=address, made_with=made_with
    )


def _instantiate(
    cls: type, source: str, settings: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the object, and the settings that the constructor took."""
    name = repr(cls.__qualname__ if source == "callable" else source)
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise RewardError(f"rewards: {name} is a class whose objects cannot be called; give it __call__")
    made_with = {key: value for key, value in settings.items() if key in _constructor_arguments(cls)}
    try:
        return cls(**made_with), made_with
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"rewards: the class {name} cannot be called with ({', '.join(made_with)}): {type(error).__name__}: "
            f"{error}; its constructor's arguments go into the entry: {{name: ..., argument: value}}"
        ) from error


def _constructor_arguments(cls: type) -> tuple[str, ...]:
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return ()
    parameters = inspect.signature(cls).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _from_address(address: str, settings: Mapping[str, Any]) -> RewardSpec:
    fn = load_named(address, "rewards", RewardError)
    if not callable(fn):
        raise RewardError(f"rewards: {address!r} is {fn!r}, which is not a function")
    place, _, attribute = address.rpartition(":")
    if place.endswith(".py"):
        place = str(Path(expand_home(place)).resolve())
    return _from_function(fn, address, f"{place}:{attribute}", settings)


def _from_entry_point(name: str, settings: Mapping[str, Any]) -> RewardSpec:
    from importlib.metadata import entry_points

    points = list(entry_points(group=GROUP, name=name))
    if not points:
        raise RewardError(registry.unknown(name, {*registry.names(), *entry_point_names()}))
    if len({point.value for point in points}) > 1:
        values = ", ".join(point.value for point in points)
        raise RewardError(f"rewards: several packages offer {name!r}: {values}; name one of these")
    value = points[0].value
    try:
        fn = points[0].load()
    except (Exception, SystemExit) as error:
        raise RewardError(import_failed(f"rewards: {name!r}", error)) from error
    if not callable(fn):
        raise RewardError(f"rewards: the entry point {name!r} ({value}) is not a function")
    spec = _from_function(fn, f"entry point {value}", value.partition("[")[0].strip(), settings)
    return _renamed(spec, name)


def _check_kind(spec: RewardSpec, key: str, value: Any) -> None:
    """Check a setting against its annotation, if that names plain kinds: `no` is a text, and would count as true."""
    parameter = inspect.signature(spec.fn).parameters.get(key)
    if parameter is None or parameter.kind is not parameter.KEYWORD_ONLY:
        return
    try:  # this annotation alone: others may name what is imported for type checkers only
        kind = get_type_hints(SimpleNamespace(__annotations__={key: parameter.annotation}), {})[key]
    except (NameError, TypeError, SyntaxError, AttributeError):
        return
    if not {bool, int, float, str, type(None)}.issuperset(get_args(kind) or (kind,)):
        return
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        wrong = f"{key} = {value!r}: must be {describe_type(kind)}"
        raise RewardError(f"rewards: reward {spec.name!r}: {wrong}") from None


def _unknown_key(spec: RewardSpec, key: str) -> str:
    settings = [*(_constructor_arguments(type(spec.fn)) if spec.address else ()), *spec.settable]
    hint = did_you_mean(key, [*RESERVED_KEYS, *settings])
    if key in spec.supplied:
        hint = "it is given to the function at every call. "
    return (
        f"rewards: reward {spec.name!r} has no setting {key!r}; {hint}legal keys: "
        f"{', '.join(settings) or 'none'} of its own; of every reward {', '.join(RESERVED_KEYS)}"
    )


def address_of(spec: RewardSpec) -> str:
    """Return the address of a reward's function.

    Raise RewardError for lambdas, closures, and functions of a notebook or of the script that runs: to import them, a
    worker process would run it again.
    """
    address = spec.address or address_in_module(spec.fn)
    if address is None or in_this_process_alone(address):
        raise RewardError(
            f"reward {spec.name!r} cannot be isolated: its function exists in this process alone; put it into a file "
            f"of its own and name it as path/to/file.py:function, or leave out isolated"
        )
    return address
