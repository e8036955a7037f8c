"""The configuration of a run: one tree, the same in YAML, on the command line (`a.b=value`) and in Python.

sections        every section and field, each with its docstring: what it is, unit, range, default
values          kinds of value: paths, numbers, rewards, guards, and what each accepts
source_entries  sources of rows: paths, tasks, mixtures and their entries
grpo_config     GRPOConfig, the root of the tree, and the checks between sections
engine_facts    facts about the engines of `rollout.engine`
shipped         recipes and layers by name
yaml_file       YAML files, overrides, and paths that are relative to a config file
yaml_dialect    the YAML of these files
section         the base of every section, its fields by path, and its errors as ConfigError
messages        words of messages: values, defaults and types

The names below load on first use: a reward's options are a section too, and need no more than `section` and `values`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_grpo.config.grpo_config import FieldHelp, GRPOConfig
    from mm_grpo.config.sections import (
        AlgorithmConfig,
        DataConfig,
        EvalSampling,
        LoRAConfig,
        ModelConfig,
        OptimConfig,
        RolloutConfig,
        RunConfig,
        ServerConfig,
        TwinViewConfig,
        VLLMConfig,
    )
    from mm_grpo.config.yaml_file import apply_overrides

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "EvalSampling",
    "FieldHelp",
    "GRPOConfig",
    "LoRAConfig",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "RunConfig",
    "ServerConfig",
    "TwinViewConfig",
    "VLLMConfig",
    "apply_overrides",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    root, sections = (import_module(f"{__name__}.{module}") for module in ("grpo_config", "sections"))
    return getattr(root, name, None) or getattr(sections, name)
