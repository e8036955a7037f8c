"""The configuration of a run: one tree, the same in YAML, on the command line (`a.b=value`) and in Python.

sections        every section and field, each with its docstring: what it is, unit, range, default; lora: `model.lora`,
                served: `rollout.server`
values          kinds of value: paths, numbers, sources, rewards, guards, and what each accepts
source_entries  one source of a mixture: its keys and their values
grpo_config     GRPOConfig, the root of the tree, and the checks between sections; seed_plan: are there seeds enough
yaml_file       YAML files, overrides, and paths that are relative to a config file
messages        the base of every section, and what is raised about a wrong value
convert         a config of TRL, ms-swift or verl as one of ours; foreign_file reads it, foreign_keys has the tables
trainer_arguments  arguments of TRL's GRPOTrainer, and what they are called here
other_trainers  keys and values of TRL, ms-swift and verl, and what they are called here
"""

from mm_grpo.config.grpo_config import FieldHelp, GRPOConfig
from mm_grpo.config.lora import LoRAConfig
from mm_grpo.config.sections import (
    AlgorithmConfig,
    DataConfig,
    EvalSampling,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
)
from mm_grpo.config.seed_plan import check_seed_plan
from mm_grpo.config.served import ServerConfig, VLLMConfig
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
    "VLLMConfig",
    "apply_overrides",
    "check_seed_plan",
]
