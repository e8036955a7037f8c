"""The configuration of a run: `GRPOConfig`, and every check between its sections.

One tree, the same on disk (YAML), on the command line (`a.b=value`) and in Python. Where things are:

    config_fields    the sections and their fields, each with its help text
    config_algorithm the section algorithm
    config_values    kinds of value: data sources, entries of `rewards`, ...
    config_checks    checks of options that contradict or ignore one another
    config_section   the base of every section: how mistakes are told
    config_names     what to say about a key that does not exist, with the names of other trainers
    config_load      YAML files and overrides

A check between sections is a function in `CHECKS`. Words: a step is one rollout of
P = `rollout.prompts_per_step` prompts x G = `rollout.num_generations` completions, and the optimizer
updates made from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import model_validator

from mm_grpo.config_algorithm import AlgorithmConfig
from mm_grpo.config_checks import OPTION_CHECKS
from mm_grpo.config_fields import (
    DataConfig,
    EvalSampling,
    LoRAConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
)
from mm_grpo.config_load import apply_overrides, read_yaml, save_text, write_yaml
from mm_grpo.config_paths import beside
from mm_grpo.config_section import Legal, Section, help_text, leaves, legal, line, setting, written
from mm_grpo.config_values import RewardEntry
from mm_grpo.errors import ConfigError

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
    "apply_overrides",
    "check_seed_plan",
]

TRAINING_SEEDS = 2**30
"""Seeds of training are below this number; those of evaluation are not (the seed law)."""


class FieldHelp(NamedTuple):
    """One leaf of the tree, as the help shows it."""

    path: str
    type: str
    default: str
    description: str


class GRPOConfig(Section):
    """A whole configuration. Every way to make one validates it and raises ConfigError.

    An assignment to a field is checked at once; checks between sections run again in `check`.
    """

    model: ModelConfig = setting(..., "The policy, and how it is held")
    data: DataConfig = setting(DataConfig, "The rows, and the limits on their images and prompts")
    rollout: RolloutConfig = setting(RolloutConfig, "How many completions a step samples, and how")
    rewards: Annotated[list[RewardEntry], Legal("a list of names or mappings with a name, such as [iou]")] = (
        setting(
            list,
            "Registered names, path/to/file.py:function, package.module:function, or mappings"
            " {name: ..., weight: 1.0}, whose other keys are the reward's arguments",
        )
    )
    algorithm: AlgorithmConfig = setting(AlgorithmConfig, "Advantages and loss")
    optim: OptimConfig = setting(OptimConfig, "The optimizer, and how completions are laid out for it")
    run: RunConfig = setting(RunConfig, "The run folder, the length of the run, and what watches it")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = [text for check in CHECKS for text in [check(self)] if text]
        if mistakes:
            raise line("\n".join(mistakes))
        return self

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Self:
        """The config in a YAML file, with `a.b=value` overrides laid over it.

        Relative paths in the file are looked for beside it first, then from the working folder.
        """
        values = beside(read_yaml(path), Path(path).parent)
        return cls.from_dict(apply_overrides(values, overrides))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The config in a nested mapping, which is left as it is."""
        return cls.model_validate(dict(values) if isinstance(values, Mapping) else values)

    def to_yaml(self) -> str:
        """Every field as YAML; `from_yaml` reads it back as an equal config."""
        return write_yaml(self.model_dump())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_yaml` to a file, whole or not at all."""
        save_text(path, self.to_yaml())

    def check(self) -> None:
        """Check everything again: after assignments to sections, or changes inside lists and mappings."""
        type(self).from_dict(self.model_dump())

    def require_rewards(self, given: bool = False) -> None:
        """Refuse a config without rewards, unless some are `given` in Python."""
        if not self.rewards and not given:
            raise ConfigError(
                "rewards = []: must name at least one reward, such as rewards: [iou] (`mm-grpo rewards` lists"
                " them), unless functions are passed to GRPOTrainer(config, rewards=[...])"
            )

    def require_eval(self, given: bool = False) -> None:
        """Refuse evaluations during the run without rows for them, unless some are `given` in Python."""
        if self.run.eval_every > 0 and self.data.eval is None and not given:
            raise ConfigError(
                f"run.eval_every = {self.run.eval_every}: needs rows to evaluate on; set data.eval, or 0 here"
            )

    def batch_sentence(self, processes: int = 1, packs: int | None = None) -> str:
        """The arithmetic of one step: prompts x generations -> packs x processes -> updates."""
        prompts, generations = self.rollout.prompts_per_step, self.rollout.num_generations
        iterations, (few, rest) = self.algorithm.num_iterations, divmod(prompts, self.optim.updates_per_step)
        share = f"{few:,} or {few + 1:,} prompts each" if rest else f"{_counted(few, 'prompt')} each"
        return (
            f"{_counted(prompts, 'prompt')} x {generations:,} generations ="
            f" {prompts * generations:,} completions a step ->"
            f" {'packs' if packs is None else _counted(packs, 'pack')} of at most"
            f" {self.optim.max_tokens_per_pack:,} tokens on {_counted(processes, 'process', 'es')} ->"
            f" {_counted(self.optim.updates_per_step * iterations, 'update')}"
            f" ({share}{f', {iterations:,} iterations' if iterations > 1 else ''})"
        )

    @classmethod
    def field_help(cls) -> list[FieldHelp]:
        """Path, type, default and description of every field, in the order of the file."""
        return [
            FieldHelp(
                path,
                legal(field.annotation, field.metadata),
                "required" if field.is_required() else written(field.get_default(call_default_factory=True)),
                help_text(field),
            )
            for path, field in leaves(cls)
        ]


def check_seed_plan(max_steps: int, attempts: int, prompts: int, generations: int) -> None:
    """Refuse a run that would need more seeds than there are (the seed law).

    A run plans max_steps x attempts x prompts x generations seeds; there are M, the largest multiple
    of `generations` not above 2^30.
    """
    seeds = TRAINING_SEEDS // generations * generations
    planned = max_steps * attempts * prompts * generations
    if planned > seeds:
        raise ConfigError(
            f"run.max_steps = {max_steps}: {max_steps} steps x {attempts} attempts x {prompts} prompts x"
            f" {generations} generations need {planned} seeds, and there are {seeds}; lower run.max_steps,"
            " rollout.max_attempts, rollout.prompts_per_step or rollout.num_generations"
        )


def _updates_have_prompts(config: GRPOConfig) -> str | None:
    updates, prompts = config.optim.updates_per_step, config.rollout.prompts_per_step
    if updates <= prompts:
        return None
    return (
        f"optim.updates_per_step = {updates}: must be <= rollout.prompts_per_step, which is {prompts};"
        " every update needs a prompt"
    )


def _warmup_ends(config: GRPOConfig) -> str | None:
    warmup, steps = config.optim.warmup_steps, config.run.max_steps
    shares, iterations = config.optim.updates_per_step, config.algorithm.num_iterations
    if steps is None or warmup <= steps * shares * iterations:
        return None
    return (
        f"optim.warmup_steps = {warmup}: must be <= the updates of the run, which are"
        f" {steps * shares * iterations} (run.max_steps {steps} x optim.updates_per_step {shares} x"
        f" algorithm.num_iterations {iterations})"
    )


def _evaluation_has_data(config: GRPOConfig) -> str | None:
    if config.data.train is None:  # rows are passed in Python, and may be for evaluation too
        return None
    try:
        config.require_eval()
    except ConfigError as error:
        return str(error)
    return None


def _seeds_suffice(config: GRPOConfig) -> str | None:
    rollout = config.rollout
    try:
        check_seed_plan(
            config.run.max_steps or 1, rollout.max_attempts, rollout.prompts_per_step, rollout.num_generations
        )
    except ConfigError as error:
        return str(error)
    return None


CHECKS: tuple[Callable[[GRPOConfig], str | None], ...] = (
    _updates_have_prompts,
    _warmup_ends,
    _evaluation_has_data,
    _seeds_suffice,
    *OPTION_CHECKS,
)
"""The checks between sections: each gives None, or one line that says what is wrong."""


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"


Section.legal_paths = tuple(path for path, _ in leaves(GRPOConfig))
