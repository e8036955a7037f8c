"""From an entry of the config's `rewards` list to a `RewardSpec`, and a stable identity for saving it.

An entry is a registered or built-in name, `path/to/file.py:function`, `package.module:function`, the
name of an entry point in the group `mm_grpo.rewards`, a callable, or a mapping
`{name: <any of those>, weight: 0.5, as: other_name, threshold: 0.5}` whose other keys are bound to
the function's parameters. To add another form, add a branch in `_find`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards import registry
from mm_grpo.rewards.registry import RewardSpec

GROUP = "mm_grpo.rewards"
RESERVED_KEYS = ("name", "weight", "as")
_FILE_MODULE = "mm_grpo_reward_file_"

Entry = str | Mapping[str, Any] | Callable[..., Any] | RewardSpec

_LOADED: dict[Path, tuple[str, ModuleType]] = {}


def resolve_entries(entries: Iterable[Entry], *, base: Path | None = None) -> list[RewardSpec]:
    """Resolve a whole list; RewardError when it is empty or when two entries have one name."""
    if isinstance(entries, str | Mapping):
        raise RewardError(f"rewards is {entries!r}; it must be a list, such as [exact_match, format]")
    specs = [resolve_entry(entry, base=base) for entry in entries]
    if not specs:
        raise RewardError(f"rewards is empty; it needs at least one of: {', '.join(registry.names())}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise RewardError(
                f"rewards: two entries are named {spec.name!r}, and their scores would mix; rename one with "
                f"`as`: {{name: {spec.name}, as: other}}"
            )
        seen.add(spec.name)
    return specs


def resolve_entry(entry: Entry, *, base: Path | None = None) -> RewardSpec:
    """One entry as a spec. `base` is the folder of relative paths: the current one by default."""
    if not isinstance(entry, Mapping):
        return _find(entry, base)
    if "name" not in entry:
        raise RewardError(
            f"rewards: the entry {dict(entry)!r} has no `name`; write {{name: exact_match, weight: 0.5}}"
        )
    spec = _find(entry["name"], base, alias=entry.get("as"))
    bound = {key: value for key, value in entry.items() if key not in RESERVED_KEYS}
    for key in bound:
        if key not in spec.settable:
            raise RewardError(_unknown_key(spec, str(key)))
    return dataclasses.replace(
        spec,
        weight=registry.check_weight(spec.name, entry.get("weight", spec.weight)),
        bound={**spec.bound, **bound},
    )


def describe(spec: RewardSpec) -> dict[str, str | None]:
    """What a saved config says of the function: its module, qualified name and the SHA-256 of its source.

    `sha256` is None where Python has no source (a function typed at a prompt). A closure's values
    and a partial's arguments are not part of the identity.
    """
    inner = registry.innermost(spec.fn)
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    try:
        source = inspect.getsource(inner)
    except (OSError, TypeError):
        digest = None
    else:
        digest = hashlib.sha256(source.encode()).hexdigest()
    module = inner.__module__
    if module.startswith(_FILE_MODULE):  # the rest of that name depends on where the file lies
        module = Path(sys.modules[module].__file__ or module).stem
    return {"module": module, "qualname": inner.__qualname__, "sha256": digest}


def entry_point_names() -> list[str]:
    """The names that installed packages offer in the group `mm_grpo.rewards`, sorted."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=GROUP)})


def _find(what: Any, base: Path | None, alias: str | None = None) -> RewardSpec:
    if isinstance(what, RewardSpec):
        spec = what
    elif callable(what):
        return _of_function(what, "callable", alias)
    elif not isinstance(what, str):
        raise RewardError(
            f"rewards: {what!r} is not a reward; legal are a name, path/to/file.py:function, "
            f"package.module:function, a function, or a mapping with `name`"
        )
    elif ":" in what:
        return _from_place(what, base, alias)
    elif what.endswith(".py"):
        raise RewardError(f"rewards: {what!r} names a file; name a function in it too: {what}:function")
    elif what in registry.names():
        spec = registry.get(what)
    else:
        return _from_entry_point(what, alias)
    return _renamed(spec, alias)


def _renamed(spec: RewardSpec, alias: str | None) -> RewardSpec:
    if alias is None:
        return spec
    registry.check_name(alias)
    return dataclasses.replace(spec, name=alias)


def _of_function(fn: Callable[..., Any], source: str, alias: str | None) -> RewardSpec:
    """The spec of a function: as it was decorated, if it was."""
    held = registry.registered_as(fn)
    if held is None:
        return registry.make_spec(fn, name=alias, source=source)
    return _renamed(dataclasses.replace(held, source=source), alias)


def _from_place(what: str, base: Path | None, alias: str | None) -> RewardSpec:
    place, _, attribute = what.rpartition(":")
    if not place or not attribute:
        raise RewardError(
            f"rewards: {what!r} is incomplete; write path/to/file.py:function or package.module:function"
        )
    is_file = place.endswith(".py") or os.sep in place
    module = _load_file(what, place, base) if is_file else _load_module(what, place)
    fn: Any = module
    for part in attribute.split("."):
        fn = getattr(fn, part, None)
    if not callable(fn):
        found = vars(module).items()
        functions = [n for n, f in found if inspect.isfunction(f) and f.__module__ == module.__name__]
        near = difflib.get_close_matches(attribute, functions, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardError(
            f"rewards: {what!r}: {place} has no function {attribute!r}; {hint}its functions: "
            f"{', '.join(functions) or 'none'}"
        )
    return _of_function(fn, what, alias)


def _load_file(what: str, place: str, base: Path | None) -> ModuleType:
    path = ((base or Path.cwd()) / Path(place).expanduser()).resolve()
    if not path.is_file():
        raise RewardError(
            f"rewards: {what!r}: there is no file {path}; give a path from the folder you start in"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if path in _LOADED and _LOADED[path][0] == digest:
        return _LOADED[path][1]
    name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"rewards: {what!r}: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        # Not loader.exec_module: its bytecode cache goes by the file's second and size, and would run
        # the old code of a file that was edited within one second.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(_import_failed(what, error)) from error
    _LOADED[path] = (digest, module)
    return module


def _load_module(what: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise RewardError(_import_failed(what, error)) from error


def _import_failed(what: str, error: BaseException) -> str:
    if isinstance(error, RewardError):
        return f"rewards: {what!r} cannot be imported: {error}"
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename != __file__ and "importlib" not in f.filename
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    hint = (
        "; install the package, or set PYTHONPATH to its folder (a reward file is imported without its "
        "neighbours)"
        if isinstance(error, ModuleNotFoundError)
        else ""
    )
    return f"rewards: {what!r} cannot be imported: {type(error).__name__}: {error}{where}{hint}"


def _from_entry_point(what: str, alias: str | None) -> RewardSpec:
    from importlib.metadata import entry_points

    points = list(entry_points(group=GROUP, name=what))
    if not points:
        raise RewardError(registry.unknown(what, {*registry.names(), *entry_point_names()}))
    if len({point.value for point in points}) > 1:
        raise RewardError(
            f"rewards: several packages offer an entry point {what!r}: {', '.join(p.value for p in points)}; "
            f"name one of these instead"
        )
    try:
        fn = points[0].load()
    except (Exception, SystemExit) as error:
        raise RewardError(_import_failed(what, error)) from error
    if not callable(fn):
        raise RewardError(f"rewards: the entry point {what!r} ({points[0].value}) is not a function")
    return _of_function(fn, f"entry point {points[0].value}", alias or what)


def _unknown_key(spec: RewardSpec, key: str) -> str:
    legal = [*RESERVED_KEYS, *spec.settable]
    near = difflib.get_close_matches(key, legal, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"rewards: reward {spec.name!r} has no setting {key!r}; {hint}legal keys: {', '.join(legal)}"
