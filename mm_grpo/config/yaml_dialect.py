"""The YAML of config files: version 1.2, in which `1e-6` is a number, and `off` and `yes` are texts."""

from __future__ import annotations

import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

MAX_VALUES, MAX_LEVELS = 100_000, 50
"""Limits of a document with its aliases (*name) expanded, as every copy of it has them."""


class _Constructor(SafeConstructor):
    def construct_document(self, node: Any) -> Any:
        count, nodes = 0, [(node, 1)]
        while nodes:
            inner, level = nodes.pop()
            count += 1
            if count > MAX_VALUES or level > MAX_LEVELS:
                limits = f"more than {MAX_VALUES:,} values, or {MAX_LEVELS} levels"
                raise ConstructorError(
                    problem=f"with its aliases (*name) expanded it has {limits}; write less"
                )
            for value in () if isinstance(inner, ScalarNode) else inner.value:
                nodes += [(part, level + 1) for part in (value if isinstance(value, tuple) else (value,))]
        return super().construct_document(node)


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        # unusual line ends (U+0085, U+2028) would be written unescaped, and read back as spaces
        usual = data.replace("\n", "").replace("\t", "").isprintable()
        style = '"' if not usual else "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_float(self, data: float) -> ScalarNode:
        node = super().represent_float(data)
        node.value = re.sub(r"^(-?\d+)e", r"\1.0e", node.value)  # PyYAML reads 1e-06 as a text
        return node


_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)


def new_yaml() -> YAML:
    """Return a reader and writer of YAML; a key that occurs twice is an error."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer, yaml.Constructor = _Representer, _Constructor
    yaml.default_flow_style, yaml.width = False, 110
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml
