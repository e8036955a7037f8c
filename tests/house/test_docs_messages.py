"""Messages that the docs quote are messages of the package: they go stale in silence otherwise."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
OWN_DATA = re.findall(r"^\|[^|]+\| `([^`|]+)` \|$", (ROOT / "docs" / "own-data.md").read_text(), re.MULTILINE)
VALUE = "\0"
"""What stands for a value that is put into a message."""


def _template(node: ast.AST) -> str | None:
    """The text that an expression makes, with VALUE for what is put in; None where it makes none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(v) or VALUE if isinstance(v, ast.Constant) else VALUE for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{_template(node.left) or VALUE}{_template(node.right) or VALUE}"
    return None


@cache
def messages() -> list[str]:
    """Every text of the package that is no docstring, joined as the compiler joins it."""
    found = []
    for file in (ROOT / "mm_grpo").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        found += [
            text for n in ast.walk(tree) if n not in docstrings and (text := _template(n)) and " " in text
        ]
    return found


def is_a_message(quoted: str) -> bool:
    """Whether one text of the package has the parts of `quoted` in order, each whole, with values in between."""
    parts = [part for part in re.split(r"\s*\.\.\.\s*", quoted) if part]
    pattern = re.compile(r"[^\n]*?".join(map(re.escape, parts)))
    return any(pattern.search(text) for text in messages())


@pytest.mark.slow
@pytest.mark.parametrize("quoted", [*HEADINGS, *OWN_DATA])
def test_a_message_that_is_quoted_is_in_the_package(quoted: str) -> None:
    assert is_a_message(quoted)


def test_a_message_that_is_in_no_source_is_noticed() -> None:
    assert len(HEADINGS) >= 50 and len(OWN_DATA) == 5
    assert not is_a_message("run.eval_every = ...: needs rows to evaluate on; set data.test")
    assert not is_a_message("set data.eval, or 0 here ... needs rows to evaluate on")
