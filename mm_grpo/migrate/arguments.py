"""Messages for arguments of `GRPOTrainer` that are TRL's, or that are at the wrong place.

To add a foreign argument, add a line to ARGUMENTS. Keys of a config are in `keys`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from mm_grpo.config.grpo_config import GRPOConfig
from mm_grpo.errors import ConfigError, did_you_mean, shorten

P = ParamSpec("P")
Self = TypeVar("Self")

_PROCESSOR = "the model's own processor is loaded from model.path; leave it out"
ARGUMENTS: Mapping[str, str] = {
    "reward_funcs": "write rewards=[...]",
    "args": "the config is the first argument: GRPOTrainer(GRPOConfig(...), ...)",
    "train_dataset": "write train=...",
    "eval_dataset": "write eval=...",
    "processing_class": _PROCESSOR,
    "tokenizer": _PROCESSOR,
    "reward_processing_classes": "a reward loads what it needs by itself; leave it out",
    "reward_weights": "give each reward its weight: rewards=[{'name': ..., 'weight': 1.0}, ...]",
    "peft_config": "write it into the config: model=ModelConfig(path=..., lora=LoRAConfig(rank=16, alpha=32))",
    "quantization_config": "write it into the config: model=ModelConfig(..., lora=LoRAConfig(), quantization='nf4')",
    "optimizers": "the optimizer is AdamW; set it in the config: optim=OptimConfig(...)",
    "rollout_func": "write tools=[...] or environment_factory=..., where the model is to act in several turns",
    "ref_model": "write it into the config: algorithm=AlgorithmConfig(beta=..., reference_path=...)",
}
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "rewards": (lambda value: isinstance(value, list | tuple), "a list, such as ['count', my_function]"),
    "processor": (lambda value: hasattr(value, "family"), f"a processor of mm_grpo's own; {_PROCESSOR}"),
    "resume": (lambda value: isinstance(value, bool), "True or False; True goes on with the run in run.dir"),
}
"""A check of the value of each argument that is easily another thing in TRL, and what is legal."""


def explain_arguments(init: Callable[Concatenate[Self, P], None]) -> Callable[Concatenate[Self, P], None]:
    """Decorate a trainer's `__init__`: collect its unknown arguments into one ConfigError."""

    @functools.wraps(init)
    def checked(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if lines := list(_faults(inspect.signature(init), args, kwargs)):
            raise ConfigError("\n".join(lines))
        init(self, *args, **kwargs)

    return checked


def _faults(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in signature.parameters if name != "self"]
    config = args[0] if args else kwargs.get("config")
    if len(args) > 1 or not isinstance(config, GRPOConfig):
        kind = f"a {type(config).__module__.split('.')[0]}.{type(config).__name__}"
        many = f", the first of {len(args)} arguments by position" if len(args) > 1 else ""
        yield (
            f"config is {'missing' if config is None else kind}{many}; write GRPOTrainer(GRPOConfig(...), train=..., "
            "rewards=[...]); GRPOConfig.from_dict and from_yaml make one"
        )
    for name, (fits, legal) in KINDS.items():
        if (value := kwargs.get(name)) is not None and not fits(value):
            yield f"{name} = {shorten(repr(value), 80)}: must be {legal}"
    for name in (name for name in kwargs if name not in names):
        advice = ARGUMENTS.get(name, f"{did_you_mean(name, names)}GRPOTrainer takes {', '.join(names)}")
        yield f"{name}: unknown argument; {advice}"
