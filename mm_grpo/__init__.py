"""mm_grpo fine-tunes vision-language models with Group Relative Policy Optimization (GRPO).

The way through the package, in the order in which the data flows::

    dataset row → Sample → Prompt → Completions → rewards → Group → Pack → loss → update → engine
       data/     processors/     rollout/      rewards/  algorithm/  learner/            rollout/

The spine is what one reads to understand or change the algorithm: 24 files, 5,600 lines, some four hours. It knows no
feature by name and imports nothing of the annexes. examples/loop.py is the spine in use, on a page. In reading order::

    types                    records that are handed on: Sample, Prompt, Completion, Group
    data/dataset             rows of a source, each read as a Sample when it is asked for
    data/order               which rows a step asks about
    processors/base          interface of a model family's processor, and the table of families
    processors/hf_processor  a Sample becomes a Prompt: token ids, and images as tensors
    rollout/seeds            one seed for each generation of a run
    rollout/prompts          prompts of a step, made ahead in threads
    rollout/engine           requests, streams, and the interface of an engine
    rollout/runner           prompts become groups of completions with rewards, in training and evaluation
    rollout/scored_groups    groups get KL, rewards and advantages
    rollout/collect          all groups of a step
    rollout/pipeline         when the groups of a step are sampled: in the step, or ahead of it
    rewards/scorer           completions become scores
    algorithm/advantages     rewards become advantages
    algorithm/losses         loss of a token
    learner/minibatch        groups become minibatches, one for each update
    learner/pack             prompts and completions laid out as rows that share prefixes
    learner/forward          forward pass of a pack
    learner/logprobs         log-probabilities and entropies of tokens
    learner/loss             loss of a pack
    learner/optimizer        gradients of all processes, clipped, and the optimizer's step
    learner/learner          the updates of a step
    parity/sync              new weights are sent to the engine, which has to prove that it uses them
    trainer                  the loop

The rest of these folders, by what plugs into the spine, and where::

    loss features   learner/features    extra passes, rows in packs, weights of advantages, terms of the loss
    engines         rollout             embedded; rollout/vllm in this process, rollout/served on other GPUs or hosts
    rewards         rewards/builtins    functions behind `@reward`, as the user's own
    families        processors          one model family a file
    orders, mixes   data                mixtures of sources, orders that depend on success
    config          config              GRPOConfig and its sections: fields, ranges, help
    guards          health, parity      a dead signal is an alarm; engine against learner
    callbacks       run                 the run folder, checkpoints, metrics, trackers, progress

Annexes, which nobody has to open to change the algorithm::

    build        parts of a run and its plan     open_run     all that a run needs around its loop
    exports      saving, showing, publishing     environments tools and worlds of several turns
    distributed  ranks, launch, collectives      timing       seconds by phase
    trained      a run's model: eval, ask, Hub   preflight    check, doctor, estimate, smoke runs
    pages        page of a run, of a check       cli          the command `mm-grpo`
    testing      tiny models for tests           version      the version
    errors       exceptions and exit codes       files        atomic writes
    import_path  files that a config names       terminal     text made safe to print
    user_code    user functions in processes     migrate      keys of other trainers
    hub          is the Hugging Face hub there   background   daemon threads, and an event loop in one
    numbers      numbers a run can calculate with  messages   parts of chat messages, limits in them
    warm_start   gold answers are taught before a run
    replay       a logged step is taken again and compared

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
    from mm_grpo.warm_start import warm

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
    "warm",
]

_LOADED_ON_USE = {
    **{name: "mm_grpo.config" for name in __all__ if name.endswith("Config") or name == "EvalSampling"},
    "GRPOTrainer": "mm_grpo.trainer",
    "reward": "mm_grpo.rewards",
    "warm": "mm_grpo.warm_start",
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
