"""The code stays plain: names say what a thing is, docstrings begin with a verb, and the spine knows no feature.

The spine is the list of files in the docstring of `mm_grpo/__init__.py`, in reading order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mm_grpo

ROOT = Path(mm_grpo.__file__).parent
EXAMPLES = ROOT.parent / "examples"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BARE = words(
    """found own each one given made held known kept asked done said taken left wanted planned counted sent seen read
    written drawn moved ended begun shown named tried every other others both some these those what which theirs ours
    mine it them whole rest most least ever alone apart beside"""
)
"""Participles and pronouns: as a name they say that something is, not what."""
OPENINGS = words("What Whether Those One Of How None")
"""First words of a docstring that does not say what the function does."""
NAMES, OPENING_SHARE = 0.010, 0.025
"""Largest share of assigned names that are bare, and of docstrings with such an opening."""
WORDS = {r"\swhere\s": 1.5, r"\sthose\s": 0.8, r",\sfor\s": 0.2}
"""Most occurrences in 1,000 words of docstrings: a condition is said with "if" or "when", a reason with "because"."""
SPINE_LINES, SPINE_COMMENTS = 5_600, 0.02
"""Most lines of the spine, and the least share of them that are comments, which stand at traps."""
FEATURES = words("perception twin credit top_entropy sight pass_rate environment toolbox openenv adapter")
PUBLIC = {
    "trainer": ("environment_factory", "save_adapter"),
    "rollout/engine": ("adapter",),
    "parity/sync": ("adapter",),
}
"""Names of the public API, and the word of the engine's interface, that a file of the spine may hold."""
ANNEXES = words("""environments run trained pages preflight cli testing migrate user_code hub terminal""")
"""Parts of the package that the spine does not import."""


def spine() -> list[str]:
    docstring = ast.get_docstring(ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))) or ""
    block = docstring.split("reading order::")[1].split("\n\n")[1]
    return [line.split()[0] for line in block.splitlines()]


def trees(*folders: Path) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def assigned(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of every variable, loop variable and field that is assigned."""
    return [
        (node.lineno, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def docstrings(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in texts if text]


def test_names_say_what_a_thing_is() -> None:
    names, bare = 0, []
    for path, tree in trees(ROOT, EXAMPLES):
        names += len(assigned(tree))
        bare += [f"{path}:{line}: {name}" for line, name in assigned(tree) if name.lstrip("_") in BARE]
    assert len(bare) <= NAMES * names, "\n".join(bare)


def test_docstrings_are_plain() -> None:
    texts = [text for _, tree in trees(ROOT, EXAMPLES) for text in docstrings(tree)]
    openings = [text[:60] for text in texts if text.split()[0].strip("`:") in OPENINGS]
    assert len(openings) <= OPENING_SHARE * len(texts), "\n".join(openings)
    text = "\n\n".join(texts)
    words = len(re.findall("[A-Za-z]+", text))
    shares = {pattern: 1000 * len(re.findall(pattern, text)) / words for pattern in WORDS}
    assert {pattern: share for pattern, share in shares.items() if share > WORDS[pattern]} == {}


def test_the_spine_is_short_and_knows_no_feature() -> None:
    lines, comments, faults = 0, 0, []
    for name in spine():
        text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        lines += len(text.splitlines())
        comments += sum(line.strip().startswith("#") for line in text.splitlines())
        tree = ast.parse(text)
        faults += [f"{name}:{line}: {word}" for line, word in assigned(tree) if word.lstrip("_") in BARE]
        for public in PUBLIC.get(name, ()):
            text = text.replace(public, "")
        faults += [f"{name}: {word}" for word in FEATURES if word in text.lower()]
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        parts = {module.split(".")[1] for module in modules if module.startswith("mm_grpo.")}
        faults += [f"{name} imports {part}" for part in sorted(parts & ANNEXES)]
    assert faults == []
    assert lines <= SPINE_LINES
    assert comments >= SPINE_COMMENTS * lines
