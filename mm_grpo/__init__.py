"""mm_grpo fine-tunes vision-language models with Group Relative Policy Optimization (GRPO).

The way through the package, in the order in which the data flows::

    dataset row → Sample → Prompt → Completions → rewards → Group → Pack → loss → update → engine
       data/     processors/     rollout/      rewards/  algorithm/  learner/            rollout/

The spine is what one reads to understand or change the algorithm; examples/loop.py is GRPO over it on one page::

    config       GRPOConfig and its sections                 types      Sample, Prompt, Completion, Group
    data         rows of a source as Samples, their order    processors one model family a file
    rollout      seeds, engines, the groups of a step        rewards    registry, scoring, built-ins
    algorithm    advantages, losses, KL                      learner    packs, log-probs, loss, optimizer
    parity       engine against learner, verified sync       health     guards against dead signals
    trainer      GRPOTrainer: the loop                       build      a run's parts and plan, from its config

The annexes hang on it, and nobody has to open them for that::

    environments tools and worlds of several turns           distributed rank, world size, collectives
    run          the run folder and what is in it            timing     seconds by phase
    trained      a run's model: eval, ask, export, the Hub   preflight  check, doctor, smoke runs
    pages        the page of a run and of a check            cli        the command `mm-grpo`
    testing      tiny models for tests                       version    the version
    errors       what is raised, and its exit code           files      atomic writes
    import_path  files and modules that a config names       terminal   text of data made safe to print
    user_code    the user's functions, in processes that end migrate    names of other trainers, `mm-grpo convert`
    hub          whether the Hugging Face hub answers        background daemon threads, an event loop in one
    numbers      numbers that a run can calculate with       open_run   what a run needs around its loop
    exports      what a trainer saves, shows and publishes

The names below are the public surface; a test holds the list. The heavy ones load on first use, so
`import mm_grpo` brings in neither torch nor vLLM. To add a name: the imports for type checkers, the
list, the table of what loads it, and the test in tests/house/test_imports.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError, DataError, GuardStop, RewardError, UserError
from mm_grpo.types import Completion, Group, Prompt, Sample
from mm_grpo.version import __version__

if TYPE_CHECKING:
    from mm_grpo.config import (
        AlgorithmConfig,
        DataConfig,
        EvalSampling,
        GRPOConfig,
        LoRAConfig,
        ModelConfig,
        OptimConfig,
        RolloutConfig,
        RunConfig,
        VLLMConfig,
    )
    from mm_grpo.rewards import reward
    from mm_grpo.trainer import GRPOTrainer

__all__ = [
    "AlgorithmConfig",
    "Completion",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EvalSampling",
    "GRPOConfig",
    "GRPOTrainer",
    "Group",
    "GuardStop",
    "LoRAConfig",
    "ModelConfig",
    "OptimConfig",
    "Prompt",
    "RewardError",
    "RolloutConfig",
    "RunConfig",
    "Sample",
    "UserError",
    "VLLMConfig",
    "__version__",
    "reward",
]

_LOADED_ON_USE = {
    **{name: "mm_grpo.config" for name in __all__ if name.endswith("Config") or name == "EvalSampling"},
    "GRPOTrainer": "mm_grpo.trainer",
    "reward": "mm_grpo.rewards",
}


def __getattr__(name: str) -> Any:
    """Load one of the heavy public names when it is first asked for."""
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module 'mm_grpo' has no attribute {name!r}")
    value = getattr(import_module(_LOADED_ON_USE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, and what every module has; not its imports, nor the submodules that are loaded by now."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
