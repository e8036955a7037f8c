"""Every name of the installed TRL and of transformers' TrainingArguments has an answer; read from their source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.config.convert import RULES, convert
from mm_grpo.config.foreign_keys import DIRECT, IGNORED_AT, NO_COUNTERPART
from mm_grpo.config.messages import leaves
from mm_grpo.config.trainer_arguments import ARGUMENTS

LEGAL = [path for path, _ in leaves(GRPOConfig)]


def members(package: str, file: str, name: str, inside: str = "") -> set[str]:
    """The fields of a class, or arguments of its method `inside`; nothing is imported, which would take vLLM along."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
    (found,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name]
    if inside:
        (method,) = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == inside]
        return {argument.arg for argument in method.args.args} - {"self"}
    return {
        n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def test_every_argument_of_trls_trainer_is_answered() -> None:
    names = members("trl", "trainer/grpo_trainer.py", "GRPOTrainer", "__init__")
    own = set(inspect.signature(GRPOTrainer).parameters)
    assert {"reward_funcs", "args", "train_dataset"} <= names
    assert names - own - set(ARGUMENTS) == set() and own & set(ARGUMENTS) == set()


@pytest.mark.parametrize(
    ("package", "file", "name", "least"),
    [
        ("trl", "trainer/grpo_config.py", "GRPOConfig", 60),
        ("trl", "trainer/base_config.py", "_BaseConfig", 3),
        ("trl", "trainer/model_config.py", "ModelConfig", 15),
        ("trl", "scripts/utils.py", "ScriptArguments", 5),
        ("trl", "scripts/grpo.py", "GRPOScriptArguments", 2),
        ("transformers", "training_args.py", "TrainingArguments", 90),
    ],
)
def test_every_key_is_taken_over_or_has_a_reason(package: str, file: str, name: str, least: int) -> None:
    found = members(package, file, name)
    assert len(found) >= least
    given = {key: {"model_name_or_path": "m", "num_generations": 8}.get(key, 1) for key in sorted(found)}
    unknown = [
        key for key, value in given.items() if "no such key" in convert({key: value}).left.get(key, "")
    ]
    assert unknown == []


def test_the_tables_name_fields_that_exist_and_no_key_twice() -> None:
    assert sorted({path for path in DIRECT.values() if path not in LEGAL}) == []
    assert set(NO_COUNTERPART) & (set(DIRECT) | set(RULES)) == set()
    assert set(DIRECT) & set(RULES) == set()
    assert set(IGNORED_AT) <= set(RULES) | set(NO_COUNTERPART) | {
        "top_p", "top_k", "min_p", "repetition_penalty", "vllm_tensor_parallel_size", "resume_from_checkpoint"
    }  # fmt: skip
