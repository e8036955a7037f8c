"""The YAML of config files: version 1.2, not PyYAML's 1.1.

`1e-6` is a number, `off`, `yes` and `2026-01-31` are texts, a key given twice is an error. What is written reads back
as the same under version 1.1 too.
"""

from __future__ import annotations

import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver


class _Resolver(VersionedResolver):
    """Leaves dates and `=` texts: no field holds a date."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        is_text = str(tag).endswith((":timestamp", ":value"))
        return super().resolve(kind, "text", implicit) if is_text else tag


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
    yaml.Resolver, yaml.Representer = _Resolver, _Representer
    yaml.default_flow_style, yaml.width = False, 110
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml
