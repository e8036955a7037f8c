"""Every argument of the installed TRL's trainer has an answer; read from its source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

from mm_grpo import GRPOTrainer
from mm_grpo.migrate.arguments import ARGUMENTS


def members(package: str, file: str, name: str, inside: str = "") -> set[str]:
    """The fields of a class, or arguments of its method `inside`; nothing is imported, which would take vLLM along."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
    (found,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name]
    if inside:
        (method,) = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == inside]
        return {argument.arg for argument in method.args.args} - {"self"}
    fields = [n.target for n in found.body if isinstance(n, ast.AnnAssign)]
    return {field.id for field in fields if isinstance(field, ast.Name)}


def test_every_argument_of_trls_trainer_is_answered() -> None:
    names = members("trl", "trainer/grpo_trainer.py", "GRPOTrainer", "__init__")
    own = set(inspect.signature(GRPOTrainer).parameters)
    assert {"reward_funcs", "args", "train_dataset"} <= names
    assert names - own - set(ARGUMENTS) == set() and own & set(ARGUMENTS) == set()
