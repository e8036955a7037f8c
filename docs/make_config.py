"""Writes docs/config.md from the fields' own descriptions: `python docs/make_config.py`."""

from __future__ import annotations

import re
from pathlib import Path

from mm_grpo.config import GRPOConfig

HEAD = """# Every field of the configuration

A config is a YAML file with these sections, or the same tree in Python ([python.md](python.md)); a command takes
`section.field=value` too. Relative paths in a file are looked for beside it first. Most runs set fields in
**bold** alone; `mm-grpo config` prints these, `mm-grpo config SECTION` all of one, `config WORD` those about it.

`rewards` is a list: names (`exact_match`), places (`path/to/file.py:function`, `package.module:function`) or mappings
(`{name: length, weight: 0.5, max_length: 200}`) with the reward's arguments.
"""


def page() -> str:
    """The whole page as Markdown, a table per section."""
    tables: dict[str, list[str]] = {}
    for field in GRPOConfig.field_help():
        section = field.path.rpartition(".")[0] or field.path
        head = f"\n## {section}\n\n| field | legal | default | meaning |\n|---|---|---|---|"
        name = f"**`{field.path}`**" if field.matters else f"`{field.path}`"
        meaning = field.description.removesuffix(f" Default: {field.default}.")  # columns have it, and bounds
        *first, last = field.type.removeprefix("one of ").split(", ")
        meaning = re.sub(rf"[:;] {', '.join(first)} or {last}(?=[;.])", "", meaning)
        meaning = re.sub(r", [<>]=? [\d.]+( and [<>]=? [\d.]+)?(?=[;.,])", "", meaning)
        meaning = meaning.partition(" They are ")[0]  # guards, which a page of their own lists
        meaning = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", meaning)
        cells = (name, field.type, f"`{field.default}`", meaning)
        row = "| " + " | ".join(escaped(cell) for cell in cells) + " |"
        tables.setdefault(section, [head]).append(row)
    return "\n".join([HEAD, *(line for table in tables.values() for line in table)]) + "\n"


def escaped(cell: str) -> str:
    """The text as it stands in a cell: a bar would end it, and `a[b][c]` be a link."""
    return cell.replace("|", "\\|").replace("\n", " ").replace("][", "]\\[")


if __name__ == "__main__":
    (Path(__file__).parent / "config.md").write_text(page(), encoding="utf-8")
