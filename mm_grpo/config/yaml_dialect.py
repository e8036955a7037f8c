"""The YAML of config files: version 1.2's core schema, not PyYAML's 1.1.

`1e-6` is a number, `off`, `yes` and `2026-01-31` are texts. A key given twice is an error. What is written reads back
as the same under version 1.1 too.
"""

from __future__ import annotations

import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver

LARGEST_TREE = 20_000
"""Values in a config file, with what each alias stands for counted where it stands."""


class _Composer(Composer):
    """Refuses lists as keys, doubled keys, which ruamel.yaml overlooks beside a merge, and aliases that do not end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        sizes: dict[int, int] = self.__dict__.setdefault("sizes", {})  # of finished nodes, with their aliases
        event = self.parser.peek_event()
        node = super().compose_node(parent, index)
        problem = None
        if not isinstance(event, AliasEvent):
            entries = [] if isinstance(node, ScalarNode) else node.value
            inner = [each for entry in entries for each in (entry if isinstance(entry, tuple) else (entry,))]
            sizes[id(node)] = 1 + sum(sizes[id(each)] for each in inner)
        elif id(node) not in sizes:
            problem = f"the alias *{event.anchor} stands inside what it names"
        if not problem and sizes[id(node)] > LARGEST_TREE:
            problem = f"more than {LARGEST_TREE} values, counting what aliases stand for"
        if problem:
            raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node: MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            problem = None if isinstance(key, ScalarNode) else "found unhashable key"
            if not problem and key.value in lines:
                problem = f"the key {key.value!r} is given twice (first on line {lines[key.value]})"
            if problem:
                raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node


class _Resolver(VersionedResolver):
    """Leaves texts what ruamel.yaml reads as more than the core schema does: dates, `=`, 1_000 and 010."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        name = str(tag).rpartition(":")[2]
        odd = name in ("int", "float") and implicit[0] and re.match(r"[-+]?0\d+$|.*_", value)
        return super().resolve(kind, "text", implicit) if odd or name in ("timestamp", "value") else tag


class _Representer(SafeRepresenter):
    """Writes what PyYAML, which reads version 1.1, reads as the same."""

    _old = YAML(typ="safe", pure=True)
    _old.version = (1, 1)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        # Unusual line ends (U+0085, U+2028) would be written as they are, and read back as spaces.
        usual = data.replace("\n", "").replace("\t", "").isprintable()
        is_text = str(self._old.resolver.resolve(ScalarNode, data, (True, False))).endswith(":str")
        style = '"' if not usual else "|" if "\n" in data else None if is_text else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_float(self, data: float) -> ScalarNode:
        node = super().represent_float(data)
        node.value = re.sub(r"^(-?\d+)e", r"\1.0e", node.value)  # 1e-06 is a text in version 1.1
        return node


_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)


def new_yaml() -> YAML:
    """A reader and writer of this dialect."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Resolver, yaml.Representer = _Composer, _Resolver, _Representer
    yaml.default_flow_style, yaml.width = False, 110
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml
