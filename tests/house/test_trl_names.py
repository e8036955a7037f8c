"""Every argument of the installed TRL's trainer has an answer; read from its source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

from mm_grpo import GRPOTrainer
from mm_grpo.migrate.arguments import ARGUMENTS


def arguments_of_trl() -> set[str]:
    """Arguments of TRL's trainer; nothing is imported, which would take vLLM along."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "trainer/grpo_trainer.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (trainer,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GRPOTrainer"]
    (init,) = [n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return {argument.arg for argument in init.args.args} - {"self"}


def test_every_argument_of_trls_trainer_is_answered() -> None:
    names = arguments_of_trl()
    own = set(inspect.signature(GRPOTrainer).parameters)
    assert {"reward_funcs", "args", "train_dataset"} <= names
    assert names - own - set(ARGUMENTS) == set() and own & set(ARGUMENTS) == set()
