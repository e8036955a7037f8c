"""`GRPOConfig`, the root of the tree, and every check between its sections.

One tree, the same on disk (YAML), on the command line (`a.b=value`) and in Python. Fields and sections
are in `sections`. A check between sections is a `yield` of one line (field, value, why not, what to
write) in one of the generators of `CHECKS`.

Words: a step is one rollout of P = `rollout.prompts_per_step` prompts x G = `rollout.num_generations`
completions, and the optimizer updates made from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from mm_grpo.config.messages import (
    Accepts,
    CheckError,
    RelativeToFile,
    Section,
    describe_type,
    help_text,
    leaves,
    yaml_repr,
)
from mm_grpo.config.sections import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
)
from mm_grpo.config.seed_plan import check_seed_plan
from mm_grpo.config.values import RewardEntry
from mm_grpo.config.yaml_file import apply_overrides, merge, read_yaml, resolve_relative_path, write_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, atomic_write
from mm_grpo.terminal import REDACTED, redact


class FieldHelp(NamedTuple):
    """One leaf of the tree, as the help shows it."""

    path: str
    type: str
    default: str
    description: str


class GRPOConfig(Section):
    """A whole configuration. Every way to make one validates it and raises ConfigError.

    It is frozen: `config.with_values({"optim.learning_rate": 1e-5})` is a changed and checked copy.
    """

    model: ModelConfig
    """The policy, and how it is held. Required."""
    data: DataConfig = DataConfig()
    """The rows, and the limits on their images and prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """How many completions a step samples, and how."""
    rewards: Annotated[
        list[RewardEntry], Accepts("a list of names or mappings with a name, such as [iou]"), RelativeToFile()
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
        lines = [line for check in CHECKS for line in check(self)]
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
        """The config in a YAML file, with the YAML files `layers` and then `a.b=value` overrides laid over it.

        Layers are merged in their order, sections key by key; lists and plain values are replaced. Relative paths in a
        file are looked for beside that file first, then from the working folder; those in overrides start from the
        working folder. So do those in the copy that a run keeps in its folder: it holds paths as they were found when
        the run started, and beside it lies what the run wrote.
        """
        values = cls._read(path)
        for layer in layers:
            values = merge(values, cls._read(layer), sources=("data.train", "data.eval"))
        values = apply_overrides(values, overrides)
        if REDACTED in str(values):
            raise ConfigError(
                f"'{path}' holds {REDACTED}: keys are not saved with a run; name its first config"
            )
        return cls.from_dict(values)

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> dict[str, Any]:
        values, folder = read_yaml(path), Path(path).parent
        if Path(path).name == "config.yaml" and (folder / RUN_MARK).exists():
            return values
        marked = [n for n, f in leaves(cls) if any(isinstance(m, RelativeToFile) for m in f.metadata)]
        for name in marked:
            section, _, key = name.rpartition(".")
            holder = values.get(section) if section else values
            if isinstance(holder, dict) and key in holder:
                holder[key] = resolve_relative_path(holder[key], folder, rewards=name == "rewards")
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The config in a nested mapping, which is left as it is."""
        return cls.model_validate(dict(values) if isinstance(values, Mapping) else values)

    def to_yaml(self) -> str:
        """Every field as YAML, keys redacted; `from_yaml` reads it back as an equal config, if it has none."""
        return write_yaml(redact(self.model_dump()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_yaml` to a file, whole or not at all. Makes its folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(Path(path), self.to_yaml())

    @property
    def learning_rate(self) -> float:
        """The peak learning rate of the run: `optim.learning_rate`, or the default for what is trained."""
        return self.optim.peak_rate(adapters=self.model.lora is not None)

    @property
    def importance_sampling_mode(self) -> str:
        """The mismatch correction of the run: `algorithm.importance_sampling_mode`, or what auto stands for."""
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
        """The fields whose null or auto stands for a value that other fields decide, with that value."""
        return {
            "optim.learning_rate": self.learning_rate,
            "algorithm.importance_sampling_mode": self.importance_sampling_mode,
        }

    def with_correction(self) -> Self:
        """A copy in which `algorithm.importance_sampling_mode` is not auto."""
        update = {"importance_sampling_mode": self.importance_sampling_mode}
        return self.model_copy(update={"algorithm": self.algorithm.model_copy(update=update)})

    def check(self) -> None:
        """Check everything again: after changes inside lists and mappings, or `model_copy`."""
        self.with_values({})

    def require_rewards(self, given: bool = False) -> None:
        """Refuse a config without rewards, unless some are `given` in Python."""
        if not self.rewards and not given:
            named = "name one, such as rewards: [iou] (`mm-grpo rewards` lists them)"
            raise ConfigError(
                f"rewards = []: {named}, or pass functions to GRPOTrainer(config, rewards=[...])"
            )

    def require_eval(self, given: bool = False) -> None:
        """Refuse evaluations during the run without rows for them, unless some are `given` in Python."""
        if self.run.eval_every > 0 and self.data.eval is None and not given:
            every = self.run.eval_every
            raise ConfigError(
                f"run.eval_every = {every}: needs rows to evaluate on; set data.eval, or 0 here"
            )

    def batch_sentence(self, processes: int = 1, packs: int | None = None) -> str:
        """The arithmetic of one step: prompts x generations -> packs x processes -> updates."""
        prompts, generations = self.rollout.prompts_per_step, self.rollout.num_generations
        iterations, (few, rest) = self.algorithm.num_iterations, divmod(prompts, self.optim.updates_per_step)
        share = f"{few:,} or {few + 1:,} prompts each" if rest else f"{_counted(few, 'prompt')} each"
        defaulted = self.model.lora is not None and self.optim.learning_rate is None
        return (
            f"{_counted(prompts, 'prompt')} x {generations:,} generations ="
            f" {prompts * generations:,} completions a step ->"
            f" {'packs' if packs is None else _counted(packs, 'pack')} of at most"
            f" {self.optim.max_tokens_per_pack:,} tokens on {_counted(processes, 'process', 'es')} ->"
            f" {_counted(self.optim.updates_per_step * iterations, 'update')}"
            f" ({share}{f', {iterations:,} iterations' if iterations > 1 else ''})"
            + (f", learning rate {self.learning_rate:g} (the default for adapters)" if defaulted else "")
        )

    @classmethod
    def field_help(cls) -> list[FieldHelp]:
        """Path, type, default and description of every field, in the order of the file."""
        found = []
        for path, field in leaves(cls):
            kind = describe_type(field.annotation, field.metadata)
            default = field.get_default(call_default_factory=True)
            shown_default = "required" if field.is_required() else yaml_repr(default)
            found.append(FieldHelp(path, kind, shown_default, help_text(field)))
        return found


# Checks between sections


def _steps(config: GRPOConfig) -> Iterator[str]:
    """Updates have prompts, warm-up ends, evaluation has rows, the seeds suffice, attempts are used."""
    rollout, optim, steps = config.rollout, config.optim, config.run.max_steps
    prompts, attempts = rollout.prompts_per_step, rollout.max_attempts
    iterations = config.algorithm.num_iterations
    if optim.updates_per_step > prompts:
        yield f"optim.updates_per_step = {optim.updates_per_step}: must be <= rollout.prompts_per_step, {prompts}"
    updates = optim.updates_per_step * iterations * (steps or 0)
    if steps is not None and optim.warmup_steps > updates:
        product = f"run.max_steps {steps} x optim.updates_per_step {optim.updates_per_step}"
        yield (
            f"optim.warmup_steps = {optim.warmup_steps}: must be <= the updates of the run, which are {updates}"
            f" ({product} x algorithm.num_iterations {iterations})"
        )
    if config.data.train is not None:  # else rows are passed in Python, and may be for evaluation too
        yield from _message(config.require_eval)
    yield from _message(lambda: check_seed_plan(steps or 1, attempts, prompts, rollout.num_generations))


def _advantages(config: GRPOConfig) -> Iterator[str]:
    """What scales and joins rewards: options that another one would ignore, or that have no meaning beside it."""
    algorithm = config.algorithm
    estimator, scale = algorithm.advantage_estimator, algorithm.scale_rewards
    each_by_itself = algorithm.multi_objective_aggregation == "normalize_then_sum"
    if each_by_itself:
        owner, own = "algorithm.multi_objective_aggregation = 'normalize_then_sum'", None
    else:  # `own` is what the estimator divides by, where that is one of the scales
        owner = f"algorithm.advantage_estimator = {estimator!r}"
        scales = {"grpo": scale, "rloo": "none", "reinforce_plus_plus_baseline": "batch", "maxrl": None}
        own = scales[estimator]
    if scale not in ("group", own):  # group is the default, and may be left
        yield f"algorithm.scale_rewards = {scale!r}: {owner} brings its own scale and would ignore this; leave it out"
    if each_by_itself and estimator != "grpo":
        yield f"algorithm.advantage_estimator = {estimator!r}: must be grpo with {owner}"
    elif algorithm.kl_in_reward and (each_by_itself or estimator == "maxrl"):
        yield f"algorithm.kl_in_reward = true: must be false with {owner}; leave the KL in the loss"


def _turns(config: GRPOConfig) -> Iterator[str]:
    """Advantages of turns go with what treats each token by itself."""
    algorithm = config.algorithm
    if algorithm.turn_gamma is None:
        return
    for field, refused, legal in (
        ("importance_sampling_level", "sequence", "token"),
        ("loss_type", "gmpo", "another one"),
        ("multi_objective_aggregation", "normalize_then_sum", "sum_then_normalize"),
        ("kl_in_reward", True, "false"),
    ):
        if getattr(algorithm, field) == refused:
            yield (
                f"algorithm.{field} = {yaml_repr(refused)}: takes whole completions; with algorithm.turn_gamma ="
                f" {algorithm.turn_gamma:g}, advantages of turns, it must be {legal}"
            )


def _loss(config: GRPOConfig) -> Iterator[str]:
    """Bounds act, and weights lie between theirs."""
    algorithm = config.algorithm
    delta, loss = algorithm.delta, algorithm.loss_type
    name = "epsilon" if algorithm.epsilon_high is None else "epsilon_high"
    upper = 1 + getattr(algorithm, name)
    if loss == "cispo" and (algorithm.epsilon_high is None or algorithm.epsilon_high < 1):
        value = yaml_repr(algorithm.epsilon_high)
        yield f"algorithm.epsilon_high = {value}: must be 1 or more with algorithm.loss_type = 'cispo' (5 is common)"
    own_bounds = ("dppo_tv", "dppo_kl", "gmpo")
    if loss == "gmpo" and algorithm.top_entropy_quantile < 1:
        share = algorithm.top_entropy_quantile
        yield f"algorithm.top_entropy_quantile = {share}: algorithm.loss_type = 'gmpo' takes all tokens; leave it out"
    if delta is not None and loss in ("cispo", "sapo", "vespo", *own_bounds):
        yield f"algorithm.delta = {delta}: algorithm.loss_type = {loss!r} has no such bound; leave it out"
    elif delta is not None and delta <= upper:
        yield f"algorithm.delta = {delta}: must be above 1 + algorithm.{name}, which is {upper:g}"
    elif loss in ("vespo", *own_bounds) and algorithm.importance_sampling_level != "token":
        level = f"algorithm.importance_sampling_level = {algorithm.importance_sampling_level!r}"
        yield f"{level}: algorithm.loss_type = {loss!r} weighs in its own way and would ignore this; leave it out"
    low, high = algorithm.importance_sampling_clip_min, algorithm.importance_sampling_clip_max
    if config.importance_sampling_mode != "none" and low is not None and high is not None and low >= high:
        most = f"algorithm.importance_sampling_clip_max, which is {high}"
        yield f"algorithm.importance_sampling_clip_min = {low}: must be below {most}"


def _kl(config: GRPOConfig) -> Iterator[str]:
    """The KL term has a weight and a gradient, and the reference model can move."""
    algorithm, why = config.algorithm, "needs algorithm.beta > 0, the weight of the KL, and that is 0"
    path, moves = algorithm.reference_path, "algorithm.sync_ref_model = true"
    if algorithm.kl_in_reward and algorithm.beta == 0:
        yield f"algorithm.kl_in_reward = true: {why}"
    if algorithm.kl_estimator == "k1" and algorithm.beta > 0 and not algorithm.kl_in_reward:
        mean = "its gradient in the loss has mean 0"
        yield f"algorithm.kl_estimator = 'k1': {mean}; write k2 or k3, or set algorithm.kl_in_reward = true"
    if path is not None and algorithm.beta == 0:
        yield f"algorithm.reference_path = '{path}': {why}"
    elif path is not None and algorithm.sync_ref_model:
        yield f"{moves}: must be false with algorithm.reference_path, a reference that stays"
    if algorithm.sync_ref_model and algorithm.beta == 0:
        yield f"{moves}: {why}"
    elif algorithm.sync_ref_model and config.model.lora is not None:
        yield f"{moves}: must be false with model.lora, whose reference is the model without its adapters"


def _parts(config: GRPOConfig) -> Iterator[str]:
    """Nothing shows what the perception term's mask hides, and what is frozen has no adapters."""
    algorithm, rollout, model = config.algorithm, config.rollout, config.model
    if algorithm.perception_coef > 0 and (rollout.tools or rollout.environment is not None):
        coef = f"algorithm.perception_coef = {algorithm.perception_coef:g}"
        yield f"{coef}: must be 0 with rollout.tools and rollout.environment, which may show what the mask hides"
    if model.lora is not None and model.lora.vision and model.freeze_vision:
        yield "model.lora.vision = true: must be false with model.freeze_vision = true"


def _staleness(config: GRPOConfig) -> Iterator[str]:
    """What is sampled ahead needs an order, and leaves the reference model alone."""
    rollout, ahead = config.rollout, config.rollout.max_staleness
    order = f"rollout.staleness_order = '{rollout.staleness_order}'"
    if ahead == 0 and rollout.staleness_order != "lockstep":
        yield f"{order}: needs rollout.max_staleness >= 1, the updates that completions may be behind"
    if ahead and config.algorithm.kl_in_reward:
        yield f"algorithm.kl_in_reward = true: must be false with rollout.max_staleness = {ahead}; it needs the learner"
    if rollout.staleness_order == "eager" and (rollout.tools or rollout.environment is not None):
        yield f"{order}: must be lockstep with rollout.tools and rollout.environment"


Check = Callable[[GRPOConfig], Iterator[str]]
CHECKS: tuple[Check, ...] = (_steps, _advantages, _turns, _loss, _kl, _parts, _staleness)


def _message(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except ConfigError as error:
        yield str(error)


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"


Section.all_paths = tuple(path for path, _ in leaves(GRPOConfig))
