"""Config files and command-line overrides as plain mappings, and back. No field is known here.

`read_yaml` and `write_yaml` go between a file and a mapping, `apply_overrides` lays `a.b=value`
texts over one, and `plain` makes any value fit for a file. What the fields mean is in `config`;
how their mistakes are told is in `config_section`.

The YAML is that of version 1.2's core schema, not PyYAML's 1.1: `1e-6` is a number, `off`, `yes` and
`2026-01-31` are texts, and a key given twice is a mistake.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mm_grpo.errors import ConfigError

_SCALARS: Mapping[str, tuple[str, list[str]]] = {  # tag: pattern, first characters ("" is the empty text)
    "null": (r"~|null|Null|NULL|", ["", *"~nN"]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": (
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    "merge": (r"<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - filled below, instead of YAML 1.1's

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice (first on line {lines[key.value]})",
                    problem_mark=key.start_mark,
                )
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes unusual line ends (U+0085, U+2028) as they are, and reads them back as spaces.
        usual = data.replace("\n", "").replace("\t", "").isprintable()
        style = '"' if not usual else "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)

for _tag, (_pattern, _first) in _SCALARS.items():
    for _resolver in (_Loader, _Dumper):
        _resolver.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises ConfigError, in one line with file, line and column, when there is no such mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such config file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"{path}: the config file cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a config file must be UTF-8 text (byte {error.start} is not)") from None
    loaded = _parse(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a config file must hold a mapping of sections, not {shown(loaded)}")
    return loaded


def write_yaml(mapping: Mapping[str, Any]) -> str:
    """The YAML text that `read_yaml` reads back as an equal mapping."""
    return yaml.dump(plain(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all: beside it first, then renamed. Makes its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def apply_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `mapping` with each `a.b=value` laid over it; a later one wins.

    A value is YAML (`8`, `[iou]`, `{task: shapes}`, `null`), except that a text needs no quotes even
    with `: ` or ` #` in it. `rewards.0.weight=2` reaches into a list. Whether a key exists is found
    when the result is validated.
    """
    result = copy.deepcopy(dict(mapping))
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"override {override!r}: must be section.key=value, such as run.seed=1")
        _set(result, parts, _override_value(text.strip(), override), override)
    return result


def plain(value: Any) -> Any:
    """A copy made of dict, list, str, int, float, bool and None only; TypeError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value == value:
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{shown(key)} as a key, which must be text")
        return {str.__str__(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    raise TypeError(f"{shown(value)}, which a config file cannot hold")


def shown(value: object, limit: int = 80) -> str:
    """A value as an error message shows it: short, on one line."""
    text = "null" if value is None else " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join((error.problem or error.context or "a mistake").split())
        raise ConfigError(f"{origin}{at}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        raise ConfigError(f"{origin}, line {line}, column {column}: not valid YAML: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from None


def _override_value(text: str, override: str) -> Any:
    # A bare text is taken as it stands: YAML would cut "Count # of cats" and split "Answer: yes".
    if text[:1] in tuple("[{\"'") or any(re.fullmatch(pattern, text) for pattern, _ in _SCALARS.values()):
        return _parse(text, f"override {override!r}")
    return text


def _set(tree: dict[str, Any], parts: list[str], value: Any, override: str) -> None:
    node: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                where = ".".join(parts[:depth])
                raise ConfigError(
                    f"override {override!r}: {where} has entries 0 to {len(node) - 1}, not {part}"
                )
            slot: Any = int(part)
        else:
            slot = part
        if last:
            node[slot] = value
            return
        child = node[slot] if isinstance(node, list) else node.get(slot)
        if child is None:
            child = node[slot] = {}
        if not isinstance(child, dict | list):
            where = ".".join(parts[: depth + 1])
            raise ConfigError(
                f"override {override!r}: {where} is {shown(child)}, which has no key {parts[depth + 1]};"
                f" set {where} whole"
            )
        node = child
