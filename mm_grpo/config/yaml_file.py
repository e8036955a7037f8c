"""Config files and command-line overrides as plain mappings, and back. No field is known here.

The YAML is yaml_dialect.py's. It is imported only when a text is parsed or written, because that takes a while.
"""

from __future__ import annotations

import copy
import glob
import io
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.config.messages import shown
from mm_grpo.config.values import is_source, plain
from mm_grpo.errors import ConfigError
from mm_grpo.files import expand_glob, read_regular_file

MAX_CHARACTERS = 200_000
"""Most characters of a config; some 20,000 a second are parsed."""


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file is an empty mapping.

    Raises ConfigError, in one line with file, line and column, when there is no such mapping.
    """
    try:
        text = read_regular_file(Path(path)).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such config file (looked in {Path.cwd()})") from None
    except (OSError, ValueError) as error:  # no file, or no UTF-8
        raise ConfigError(f"{path}: the config file cannot be read ({error})") from None
    loaded = _parse(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a config file must hold a mapping of sections, not {shown(loaded)}")
    return loaded


def write_yaml(mapping: Mapping[str, Any]) -> str:
    """Return the YAML text that `read_yaml` reads back as an equal mapping."""
    from mm_grpo.config.yaml_dialect import new_yaml

    stream = io.StringIO()
    new_yaml().dump(plain(mapping), stream)
    return stream.getvalue()


def resolve_relative_path(value: Any, folder: Path, *, rewards: bool = False) -> Any:
    """Return a path of a config file as the one in the file's `folder`, if that exists; anything else as it is.

    So a recipe's folder may be moved: `path: base` names the folder `base` beside its config.yaml. A path that does not
    exist there may exist in the working folder, or be a hub name. `value` may also be `file.py:name`, `folder:split`, a
    glob, a list of paths, a mapping of names to any of these, or with `rewards` the list of them, in which only
    `file.py:name` is a path. A mapping with the key `path` is an entry of a mixture; one with the key `task` alone may
    name a function in a file.
    """
    if isinstance(value, list):
        if rewards:
            return [_resolve_named(entry, folder) for entry in value]
        return [resolve_relative_path(entry, folder) for entry in value]
    if isinstance(value, dict) and "path" in value:
        paths = {key: value[key] for key in ("path", "image_dir") if key in value}
        return {**value, **{key: resolve_relative_path(path, folder) for key, path in paths.items()}}
    if isinstance(value, dict) and "task" in value:
        return {**value, "task": _resolve_named(value["task"], folder)}
    if isinstance(value, dict):
        return {name: resolve_relative_path(inner, folder) for name, inner in value.items()}
    if not isinstance(value, str) or not value or value.startswith("~") or Path(value).is_absolute():
        return value
    file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    if os.path.exists(folder / file):
        return f"{folder / file}{colon}{name}"
    dataset, colon, split = value.rpartition(":")
    if dataset and os.path.isdir(folder / dataset):
        return f"{folder / dataset}{colon}{split}"
    if glob.has_magic(value) and expand_glob(f"{glob.escape(str(folder))}/{value}"):
        return f"{glob.escape(str(folder))}/{value}"
    return value


def _resolve_named(entry: Any, folder: Path) -> Any:
    if isinstance(entry, dict) and isinstance(entry.get("name"), str):
        return {**entry, "name": _resolve_named(entry["name"], folder)}
    return resolve_relative_path(entry, folder) if isinstance(entry, str) and ".py:" in entry else entry


def merge(
    base: Mapping[str, Any], layer: Mapping[str, Any], sources: Collection[str] = (), at: str = ""
) -> dict[str, Any]:
    """Return a copy of `base` with the values of a later file laid over it.

    Sections and other mappings are merged key by key. Other values replace the old ones: plain values, null, lists, and
    in the fields `sources` (dotted) each source of rows ({task: ...}, {path: ...}), because its keys belong together.
    `at` is the dotted name of the two mappings, with a dot behind.

    >>> merge({"run": {"dir": "r", "seed": 1}, "rewards": ["iou"]}, {"run": {"seed": 2}, "rewards": []})
    {'run': {'dir': 'r', 'seed': 2}, 'rewards': []}
    """
    result = copy.deepcopy(dict(base))
    for key, value in layer.items():
        old, name = result.get(key), f"{at}{key}"
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            replaces = name.startswith(tuple(sources)) and (is_source(old) or is_source(value))
            value = value if replaces else merge(old, value, sources, f"{name}.")
        result[key] = copy.deepcopy(value)
    return result


def apply_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `mapping` with each `a.b=value` laid over it; a later one wins.

    A value is YAML (`8`, `[iou]`, `{task: shapes}`, `null`), except that a text needs no quotes even
    with `: ` or ` #` in it. `rewards.0.weight=2` reaches into a list. Unknown keys are refused later, when the
    result is validated.
    """
    result = copy.deepcopy(dict(mapping))
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or not text.strip():
            raise ConfigError(
                f"override {override!r}: must be section.key=value without spaces around the =, such as run.seed=1; "
                "null is no value, and '' an empty text"
            )
        set_value(result, parts, read_value(text.strip(), f"override {override!r}"), f"override {override!r}")
    return result


def read_value(text: str, origin: str) -> Any:
    """Parse the value of a text on a command line; `origin` begins the message about invalid YAML."""
    from ruamel.yaml.nodes import ScalarNode

    from mm_grpo.config.yaml_dialect import new_yaml

    # a bare text is not parsed: YAML would cut "Count # of cats" and split "Answer: yes"
    tag = str(new_yaml().resolver.resolve(ScalarNode, text, (True, False)))
    if text[:1] in tuple("[{\"'") or tag.endswith((":null", ":bool", ":int", ":float")):
        return _parse(text, origin)
    return text


def set_value(tree: dict[str, Any], parts: Sequence[str], value: Any, what: str) -> None:
    """Put `value` into nested mappings and lists; null on the way becomes a mapping.

    Raises ConfigError, starting with `what`, if a part reaches into a plain value or past a list's end.
    """
    node: Any = tree
    for depth, part in enumerate(parts):
        slot: Any = part
        where = ".".join(parts[:depth])
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError(f"{what}: {where} has entries 0 to {len(node) - 1}, not {part}")
            slot = int(part)
        elif not isinstance(node, dict):
            raise ConfigError(f"{what}: {where} is {shown(node)}, which has no key {part}; set {where} whole")
        if depth == len(parts) - 1:
            node[slot] = value
        elif (node[slot] if isinstance(node, list) else node.get(slot)) is None:
            node[slot] = {}
        node = node[slot]


def refuse_long(text: str, origin: str) -> None:
    """Raise ConfigError for a text that would take minutes to parse."""
    if len(text) > MAX_CHARACTERS:
        limit = f"a config has {MAX_CHARACTERS:,} at most; rows are read from files that data.train names"
        raise ConfigError(f"{origin}: has {len(text):,} characters, and {limit}")


def _parse(text: str, origin: str) -> Any:
    from ruamel.yaml.error import YAMLError

    from mm_grpo.config.yaml_dialect import new_yaml

    refuse_long(text, origin)
    try:
        return new_yaml().load(text)
    except (YAMLError, ValueError, LookupError, RecursionError) as error:  # ValueError: such as `!!bool x`
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{origin}{at}: not valid YAML: {problem}") from None
