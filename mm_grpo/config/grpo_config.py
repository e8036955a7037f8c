"""`GRPOConfig`, the root of the tree, and every check between its sections.

Fields and sections are in `sections`. A check between sections is a `yield` of a field and why not, or what to write,
in one of the generators of `CHECKS`.

Words: a step is one rollout of P = `rollout.prompts_per_step` prompts x G = `rollout.num_generations`
completions, and the optimizer updates made from it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.config.messages import Accepts, CheckError, describe_type, yaml_repr
from mm_grpo.config.section import Essential, RelativeToFile, Section, help_text, leaves
from mm_grpo.config.sections import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
)
from mm_grpo.config.shipped import find_config, find_layer
from mm_grpo.config.values import RewardEntry
from mm_grpo.config.yaml_file import apply_overrides, merge, read_yaml, resolve_relative_path, write_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, atomic_write
from mm_grpo.terminal import REDACTED, redact

WITHOUT_KEYS = f"# without keys and passwords: {REDACTED} stands for them\n"
"""First line of a saved config that keys were taken out of."""


class FieldHelp(NamedTuple):
    """Leaf of the tree as the help shows it; `matters` for an essential field."""

    path: str
    type: str
    default: str
    description: str
    matters: bool


class GRPOConfig(Section):
    """A whole configuration. Every way to make one validates it and raises ConfigError.

    It is frozen: `config.with_values({"optim.learning_rate": 1e-5})` is a changed and checked copy.
    """

    model: ModelConfig
    """The policy, and how it is held. Required."""
    data: DataConfig = DataConfig()
    """The rows, and the limits on their images and prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Number of completions of a step, and how they are sampled."""
    rewards: Annotated[
        list[RewardEntry],
        Accepts("a list of names or mappings with a name, such as [iou]"),
        RelativeToFile(),
        Essential(),
    ] = Field(default_factory=list)
    """Registered names, path/to/file.py:function, package.module:function, or mappings {name: ..., weight: 1.0}, whose
    other keys are the reward's arguments. Default: []."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    optim: OptimConfig = OptimConfig()
    """The optimizer, and how completions are laid out for it."""
    run: RunConfig = RunConfig()
    """The run folder, the length of the run, and what watches it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        lines = [
            f"{path} = {yaml_repr(functools.reduce(getattr, path.split('.'), self))}: {why}"
            for check in CHECKS
            for path, why in check(self)
        ]
        if lines:
            raise CheckError("\n".join(lines))
        return self

    @classmethod
    def from_yaml(
        cls,
        path: str | os.PathLike[str],
        overrides: Iterable[str] = (),
        layers: Iterable[str | os.PathLike[str]] = (),
    ) -> Self:
        """Read a YAML file, lay the YAML files `layers` and then `a.b=value` overrides over it, and validate it all.

        Shipped recipes and layers may be named (`mm-grpo recipes`): `GRPOConfig.from_yaml("shapes", layers=["lora"])`.
        Layers are merged in their order, sections key by key; lists and plain values are replaced. Relative paths in a
        file are looked for beside that file first, then from the working folder. Paths in overrides start from the
        working folder, and so do paths in the copy that a run keeps in its folder: they are as they were found when
        the run started.
        """
        path = find_config(path)
        values = cls._read(path)
        for layer in layers:
            values = merge(values, cls._read(find_layer(layer)), sources=("data.train", "data.eval"))
        values = apply_overrides(values, overrides)
        # any other text may say the same
        if path.read_bytes().startswith(WITHOUT_KEYS.encode()) and REDACTED in str(values):
            raise ConfigError(
                f"'{path}' holds {REDACTED}: keys are not saved with a run; name its first config"
            )
        return cls.from_dict(values)

    @classmethod
    def _read(cls, path: Path) -> dict[str, Any]:
        values, folder = read_yaml(path), path.parent
        if path.name == "config.yaml" and (folder / RUN_MARK).exists():
            return values
        fields = dict(leaves(cls))
        paths = [n for n, f in fields.items() if any(isinstance(m, RelativeToFile) for m in f.metadata)]
        sections = {leaf.rpartition(".")[0] for leaf in fields} - {"", *fields}
        for name in (*sections, *paths):
            section, _, key = name.rpartition(".")
            holder = values.get(section) if section else values
            if isinstance(holder, dict) and key in holder:
                if holder[key] is None and name in sections:  # every line of it is commented out
                    del holder[key]
                    continue
                holder[key] = resolve_relative_path(holder[key], folder, rewards=name == "rewards")
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Validate a nested mapping, which is left as it is."""
        return cls.model_validate(dict(values) if isinstance(values, Mapping) else values)

    def to_yaml(self) -> str:
        """Write every field as YAML, keys redacted; without keys `from_yaml` reads it back as an equal config."""
        values = self.model_dump()
        saved: dict[str, Any] = redact(values)
        return ("" if saved == values else WITHOUT_KEYS) + write_yaml(saved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_yaml` to a file, whole or not at all, and make its folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(Path(path), self.to_yaml())

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of the run: `optim.learning_rate`, or the default for what is trained."""
        return self.optim.peak_rate(adapters=self.model.lora is not None)

    @property
    def importance_sampling_mode(self) -> str:
        """Mismatch correction of the run: `algorithm.importance_sampling_mode`, with auto resolved."""
        mode = self.algorithm.importance_sampling_mode
        resolved = "token_truncate" if self.rollout.max_staleness > 0 else "none"
        return resolved if mode == "auto" else mode

    @property
    def pack_room(self) -> int:
        """Longest prompt, in tokens, that fits a pack with any completion; the perception term takes both twice."""
        copies = 2 if self.algorithm.perception_coef > 0 else 1
        return self.optim.max_tokens_per_pack // copies - self.rollout.max_completion_length

    @property
    def resolved_fields(self) -> dict[str, Any]:
        """Fields whose null or auto other fields decide, with the value decided."""
        stale = self.rollout.max_staleness > 0  # else the model decides what auto is
        mode = self.importance_sampling_mode if stale else self.algorithm.importance_sampling_mode
        return {"optim.learning_rate": self.learning_rate, "algorithm.importance_sampling_mode": mode}

    def with_correction(self, routers: Sequence[object] = ()) -> Self:
        """Return a copy in which `algorithm.importance_sampling_mode` is not auto, for a model with these `routers`.

        Rounding may give a token other experts in the learner than in the engine, which moves its log-prob far.
        """
        on = routers and self.algorithm.importance_sampling_mode == "auto"
        mode = "token_truncate" if on else self.importance_sampling_mode
        return self.with_values({"algorithm.importance_sampling_mode": mode})

    def check(self) -> None:
        """Check everything again, after changes inside lists and mappings, or `model_copy`."""
        self.with_values({})

    def require_rewards(self, passed: bool = False) -> None:
        """Raise ConfigError for a config without rewards, unless some are `passed` in Python."""
        if not self.rewards and not passed:
            raise ConfigError(
                "rewards = []: name one, such as rewards: [iou] (`mm-grpo rewards` lists them), or pass functions to "
                "GRPOTrainer(config, rewards=[...])"
            )

    def updates_in(self, steps: int) -> int:
        """Return the number of optimizer updates in `steps` steps."""
        return steps * self.optim.updates_per_step * self.algorithm.num_iterations

    def batch_sentence(self, processes: int = 1) -> str:
        """Say the arithmetic of one step: prompts x generations -> updates."""
        prompts, generations = self.rollout.prompts_per_step, self.rollout.num_generations
        iterations = self.algorithm.num_iterations
        few, remainder = divmod(prompts, self.optim.updates_per_step)
        share = f"{few:,} or {few + 1:,} prompts each" if remainder else f"{_counted(few, 'prompt')} each"
        share += f", {iterations:,} iterations" if iterations > 1 else ""
        several = f" on {processes:,} processes" if processes > 1 else ""
        defaulted = self.model.lora is not None and self.optim.learning_rate is None
        return (
            f"{_counted(prompts, 'prompt')} x {generations:,} generations = {prompts * generations:,} completions a"
            f" step{several} -> {_counted(self.updates_in(1), 'update')} ({share})"
            + (f", learning rate {self.learning_rate:g} (the default for adapters)" if defaulted else "")
        )

    @classmethod
    def field_help(cls) -> list[FieldHelp]:
        """Return the help of every field, in the order of the file."""
        fields = []
        for path, field in leaves(cls):
            kind = describe_type(field.annotation, field.metadata)
            default = field.get_default(call_default_factory=True)
            shown_default = "required" if field.is_required() else yaml_repr(default)
            matters = any(isinstance(marker, Essential) for marker in field.metadata)
            fields.append(FieldHelp(path, kind, shown_default, help_text(field), matters))
        return fields


# Checks between sections: each a field, and why its value does not go together with others


def _prompts(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse pass rates when rows are taken in order, and more updates in a step than it has prompts."""
    if config.data.pass_rate is not None and not config.data.shuffle:
        yield "data.pass_rate", "must be null with data.shuffle = false, which takes rows as they stand"
    prompts = config.rollout.prompts_per_step
    if config.optim.updates_per_step > prompts:
        yield "optim.updates_per_step", f"must be <= rollout.prompts_per_step, {prompts}"


def _scaling_conflicts(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse options that scale and join rewards when another one would ignore or contradict them."""
    algorithm = config.algorithm
    estimator = algorithm.advantage_estimator
    each_by_itself = algorithm.multi_objective_aggregation == "normalize_then_sum"
    if each_by_itself:
        owner, divisor = "algorithm.multi_objective_aggregation = normalize_then_sum", None
    else:  # the estimator's divisor, if it is one of the scales
        owner = f"algorithm.advantage_estimator = {estimator}"
        scales = {"rloo": "none", "reinforce_plus_plus_baseline": "batch", "maxrl": None}
        divisor = scales.get(estimator, algorithm.scale_rewards)
    if algorithm.scale_rewards not in ("group", divisor):  # group is the default, and may stay
        yield "algorithm.scale_rewards", f"{owner} brings its own scale and would ignore this; leave it out"
    if each_by_itself and estimator != "grpo":
        yield "algorithm.advantage_estimator", f"must be grpo with {owner}"
    elif algorithm.kl_in_reward and (each_by_itself or estimator == "maxrl"):
        yield "algorithm.kl_in_reward", f"must be false with {owner}; leave the KL in the loss"


def _turns(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse advantages of turns or tokens beside options that take whole completions."""
    algorithm = config.algorithm
    for owner, names in (
        ("turn_gamma", "importance_sampling_level loss_type multi_objective_aggregation kl_in_reward"),
        ("credit", "importance_sampling_level loss_type"),
    ):
        for field in names.split() if getattr(algorithm, owner) is not None else ():
            refused, legal = OF_COMPLETIONS[field]
            if getattr(algorithm, field) == refused:
                why = f"takes whole completions; must be {legal} with algorithm.{owner}, advantages of parts of them"
                yield f"algorithm.{field}", why


OF_COMPLETIONS: dict[str, tuple[Any, str]] = {
    "importance_sampling_level": ("sequence", "token"),
    "loss_type": ("gmpo", "another one"),
    "multi_objective_aggregation": ("normalize_then_sum", "sum_then_normalize"),
    "kl_in_reward": (True, "false"),
}
"""Values that take whole completions, and the legal ones."""


def _loss(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse bounds and weights that the loss has not, or that are out of order."""
    algorithm, loss = config.algorithm, config.algorithm.loss_type
    chosen = f"algorithm.loss_type = {loss}"
    high = "epsilon" if algorithm.epsilon_high is None else "epsilon_high"
    upper = 1 + getattr(algorithm, high)
    own_weights = loss in ("vespo", "dppo_tv", "dppo_kl", "gmpo")
    if loss == "cispo" and (algorithm.epsilon_high is None or algorithm.epsilon_high < 1):
        yield "algorithm.epsilon_high", f"must be 1 or more with {chosen} (5 is common)"
    if loss == "gmpo" and algorithm.top_entropy_quantile < 1:
        yield "algorithm.top_entropy_quantile", f"{chosen} takes all tokens; leave it out"
    if algorithm.delta is not None and (own_weights or loss in ("cispo", "sapo")):
        yield "algorithm.delta", f"{chosen} has no such bound; leave it out"
    elif algorithm.delta is not None and algorithm.delta <= upper:
        yield "algorithm.delta", f"must be above 1 + algorithm.{high}, which is {upper:g}"
    elif own_weights and algorithm.importance_sampling_level != "token":
        why = f"{chosen} weighs in its own way and would ignore this; leave it out"
        yield "algorithm.importance_sampling_level", why
    clip_min, clip_max = algorithm.importance_sampling_clip_min, algorithm.importance_sampling_clip_max
    if config.importance_sampling_mode != "none" and clip_max is not None and (clip_min or 0.0) >= clip_max:
        why = f"must be below algorithm.importance_sampling_clip_max, which is {clip_max}"
        yield "algorithm.importance_sampling_clip_min", why


def _kl(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse a KL term without a weight or a gradient."""
    algorithm = config.algorithm
    for name in ("kl_in_reward", "reference_path"):
        if getattr(algorithm, name) and algorithm.beta == 0:
            yield f"algorithm.{name}", "needs algorithm.beta > 0, the weight of the KL, and that is 0"
    if algorithm.kl_estimator == "k1" and algorithm.beta > 0 and not algorithm.kl_in_reward:
        why = "its gradient in the loss has mean 0; write k2 or k3, or set algorithm.kl_in_reward = true"
        yield "algorithm.kl_estimator", why


def _frozen_part_conflicts(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse adapters on frozen parts, and weights in four bits that something would train or cannot get."""
    rollout, lora = config.rollout, config.model.lora
    if lora is not None and lora.vision and config.model.freeze_vision:
        yield "model.lora.vision", "must be false with model.freeze_vision = true"
    if lora is None and config.model.quantization is not None:
        yield "model.quantization", "needs model.lora, because weights in four bits are not trained"
    elif config.model.quantization is not None and config.optim.zero_stage == 3:
        why = "must be 0, 1 or 2 with model.quantization, whose weights are not shared out"
        yield "optim.zero_stage", why
    remote = ENGINE_FACTS[rollout.engine].remote
    if rollout.vllm.in_four_bits and (remote or config.model.quantization is None):
        why = "quantization: nf4 needs model.quantization = nf4, whose weights vLLM runs in the learner's process"
        yield "rollout.vllm.engine_kwargs", why


def _multi_turn_conflicts(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse options that tools or sampling ahead rule out, and a twin view that shows no more than the policy's."""
    rollout, twin, ahead = config.rollout, config.algorithm.twin_view, config.rollout.max_staleness
    tools = rollout.tools or rollout.environment is not None
    if tools and twin is not None:
        yield "algorithm.twin_view", "must be null with rollout.tools and rollout.environment"
    if twin is not None and twin.view == "high_resolution":
        pixels, twin_pixels = config.data.max_pixels, twin.max_pixels
        if pixels == twin_pixels or (pixels is not None and twin_pixels is not None and twin_pixels < pixels):
            why = f"must be above data.max_pixels, which is {yaml_repr(pixels)}, to show more"
            yield "algorithm.twin_view.max_pixels", why
    if tools and config.algorithm.perception_coef > 0:
        why = "must be 0 with rollout.tools and rollout.environment, which may show what the mask hides"
        yield "algorithm.perception_coef", why
    if ahead and config.algorithm.kl_in_reward:
        why = f"must be false with rollout.max_staleness = {ahead}; it needs the learner"
        yield "algorithm.kl_in_reward", why


def _shared_gpu_conflicts(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Refuse what contradicts servers on the learner's GPUs that sleep while it works."""
    rollout, sharing = config.rollout, "with rollout.server.share_gpus = true"
    if rollout.server.share_gpus and rollout.max_staleness:
        yield "rollout.max_staleness", f"must be 0 {sharing}: servers sleep while the learner works"
    if rollout.server.share_gpus and rollout.server.transfer == "nccl":
        why = f"must be file or gloo {sharing}: NCCL joins no two processes on one GPU"
        yield "rollout.server.transfer", why
    if rollout.server.share_gpus and rollout.vllm.sleep_level == 0:
        yield "rollout.vllm.sleep_level", f"must be 1 or 2 {sharing}"


CHECKS: tuple[Callable[[GRPOConfig], Iterator[tuple[str, str]]], ...] = (
    _prompts, _scaling_conflicts, _turns, _loss, _kl, _frozen_part_conflicts, _multi_turn_conflicts,
    _shared_gpu_conflicts,
)  # fmt: skip


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
