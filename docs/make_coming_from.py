"""Writes the tables of docs/coming-from.md from what the config answers to other trainers' names.

`python docs/make_coming_from.py` replaces what stands between the two marks of each table; the rest is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from mm_grpo.config import GRPOConfig
from mm_grpo.migrate.keys import PREFIXES, ROWS, VALUES

PAGE = Path(__file__).parent / "coming-from.md"
ELSEWHERE = "other"


def page(text: str) -> str:
    """The page with its tables made anew."""
    tables = {"names": names(), "values": values()}
    for name, table in tables.items():
        text, found = re.subn(
            rf"(?s)(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda marks, table=table: f"{marks[1]}{table}{marks[2]}",
            text,
        )
        if found != 1:
            raise ValueError(f"{PAGE.name} has {found} places for the table '{name}'; it needs one")
    return text


def names() -> str:
    """A table for each of our sections: the names of others whose answer names it first, in alphabetical order."""
    sections = list(GRPOConfig.model_fields)
    by_section: dict[str, dict[str, list[str]]] = {section: {} for section in (*sections, ELSEWHERE)}
    foreign = {
        name: row.advice for name, row in ROWS.items() if row.path is None or not row.path.endswith(name)
    }
    foreign |= {f"{prefix.rstrip('_')}_...": advice for prefix, advice in PREFIXES.items()}
    for name, advice in sorted(foreign.items()):
        by_section[_section(advice, sections)].setdefault(advice, []).append(f"`{name}`")
    lines = []
    for section, answers in by_section.items():
        if answers:
            head = "No field of their own" if section == ELSEWHERE else f"In `{section}`"
            rows = [_row(", ".join(keys), advice) for advice, keys in answers.items()]
            lines += ["", f"### {head}", "", "| names there | here |", "|---|---|", *rows]
    return "\n".join([*lines, "", ""])


def values() -> str:
    """Values of other trainers, by the field that refuses them."""
    rows = [
        _row(f"`{field}`", f"`{value}`", advice)
        for field, answers in VALUES.items()
        for value, advice in answers.items()
    ]
    return "\n".join(["", "| field | value there | here |", "|---|---|---|", *rows, "", ""])


def _section(advice: str, sections: list[str]) -> str:
    found = re.search(rf"\b({'|'.join(sections)})\.\w", advice) or re.search(r"write (rewards)\b", advice)
    return found[1] if found else ELSEWHERE


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
