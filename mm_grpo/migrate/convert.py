"""Convert a config of TRL (its script arguments), ms-swift, verl or EasyR1 to ours: `mm-grpo convert`.

Each key is converted, needless, or omitted with a reason; none is dropped in silence. Defaults of the trainer that
differ from ours are written out (DEFAULTS). The table of keys is in `keys`; here are the rules of keys that need
arithmetic, or that depend on others.

TRL's and ms-swift's `max_steps`, `save_steps` and `eval_steps` count optimizer updates, ours count steps, which make
several; their batches are per device, ours are whole. With S = steps_per_generation, A = gradient_accumulation_steps
and B = per_device_train_batch_size x S x devices: P = B / G, and a step makes S / A updates, num_iterations times. In
verl and EasyR1 steps are steps, batches count prompts, and a step makes batch / mini batch updates; their warm-up
counts steps, ours updates.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from mm_grpo.config.grpo_config import WITHOUT_KEYS, GRPOConfig
from mm_grpo.config.messages import shown
from mm_grpo.config.section import leaves
from mm_grpo.config.yaml_file import set_value, write_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.migrate.files import Unexpanded, flatten
from mm_grpo.migrate.keys import PARTS, REWARDS, advice_on, by_end, row_of
from mm_grpo.numbers import is_number
from mm_grpo.terminal import printable, redact

NO_MODEL = "NAME_OF_THE_MODEL"
"""Placeholder in `model.path` if the file names no model."""

Rule = Callable[["Conversion", Any], "str | None"]
"""Converts a value; returns the reason if it cannot."""


@dataclass
class Conversion:
    """Result of converting a config: `values` are ours."""

    foreign: dict[str, Any]
    """The config by dotted key, with its trainer's defaults."""
    devices: int
    trainer: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    omitted: dict[str, str] = field(default_factory=dict)
    """Reasons by foreign key."""
    notes: list[str] = field(default_factory=list)
    """Values that were written although no key said them."""
    key: str = ""
    origin: dict[str, str] = field(default_factory=dict)
    """The foreign key of each of our fields; `key` is the one that is being converted."""

    def put(self, path: str, value: Any) -> None:
        set_value(self.values, path.split("."), value, path)
        self.origin[path] = self.key

    def find(self, ends: str, default: Any = None) -> Any:
        """Return the value of the first key that ends in one of `ends` and has one. Raises _UnknownValue."""
        keys = (key for end in ends.split() for key in self.foreign if f".{key}".endswith(f".{end}"))
        value = next((self.foreign[key] for key in keys if self.foreign[key] is not None), default)
        if isinstance(value, Unexpanded):
            raise _UnknownValue(f"needs {ends.split()[0]}, which holds {value.unknown}")
        return value

    def number(self, ends: str, default: Any) -> Any:
        """Return the number at a key. Raises ConfigError unless it is above 0; steps may be -1."""
        value = self.find(ends, default)
        if not is_number(value) or not (value > 0 or value == -1):
            raise ConfigError(f"{ends.split()[0]} = {shown(value)}: must be a number above 0")
        return value

    @property
    def generation(self) -> int:
        """TRL's completions between two updates of the weights that sample."""
        accumulated = self.number("gradient_accumulation_steps", 1)
        device = self.number("per_device_train_batch_size", 8)
        default = device * self.number("steps_per_generation", accumulated) * self.devices
        return int(self.number("generation_batch_size", default))

    @property
    def updates(self) -> Fraction:
        """The trainer's optimizer updates in one of our steps, of one iteration."""
        if self.trainer in DOTTED:
            return Fraction(self.number(_PROMPTS, 1)) / Fraction(self.number(_MINI_BATCH, 1))
        device = self.number("per_device_train_batch_size", 8) * self.devices
        return Fraction(self.generation) / Fraction(device * self.number("gradient_accumulation_steps", 1))

    def yaml(self) -> str:
        """Return our config, followed by notes and omitted keys as comments."""
        values = {name: self.values[name] for name in GRPOConfig.model_fields if name in self.values}
        foreign, public = redact(self.foreign), redact(values)
        lines = [WITHOUT_KEYS * (public != values) + write_yaml(public).rstrip("\n")]
        omitted = [f"{key} = {shown(foreign.get(key))}: {why}" for key, why in self.omitted.items()]
        for title, entries in (
            ("Written although no key said it:", self.notes),
            ("Not taken over:", omitted),
        ):
            comments = [f"#   {printable(redact(entry), lines=False)}" for entry in entries]
            lines += ["", f"# {title}", *comments] if entries else []
        return "\n".join(lines) + "\n"


class _UnknownValue(Exception):
    """A rule needs a value that the file does not say; the text is the reason."""


def convert(config: Mapping[str, Any], *, devices: int | None = None) -> Conversion:
    """Convert a config of another trainer, nested or by dotted key.

    `devices` is the number of processes that its batches are multiplied by; None is what the config says, else 1.
    Raises ConfigError if a key cannot have its value, or if the result is no valid config.
    """
    foreign = flatten(config)
    sections = {key.partition(".")[0] for key in foreign if "." in key}
    easy = "worker" in sections or "data.rollout_batch_size" in foreign
    dotted = sections & {"actor_rollout_ref", "data", "trainer", "algorithm"}
    trainer = "EasyR1" if easy else "verl" if dotted else "ms-swift" if "rlhf_type" in foreign else "TRL"
    if trainer in DOTTED:
        foreign = {key: _interpolated(value, foreign) for key, value in foreign.items()}
    defaults = _foreign_defaults(foreign, trainer)
    result = Conversion({**defaults, **foreign}, devices or 1, trainer)
    if devices is None and trainer not in DOTTED:
        _count_devices(result)
    for key, value in result.foreign.items():
        result.key = key
        if (why := _convert_key(result, key, value)) is not None:
            result.omitted[key] = why
    if not foreign.keys() & {"max_steps", "num_train_epochs"} and not result.find("total_epochs max_steps"):
        epochs = EPOCHS[trainer]
        result.notes.append(
            f"run.max_steps: {trainer}'s default is {epochs} epochs; null is one pass over the data"
        )
    if not result.values.get("model", {}).get("path"):
        result.put("model.path", NO_MODEL)
        result.notes.append(f"model.path: the file names no model; write its name in place of {NO_MODEL}")
    if not result.values.get("rewards"):
        result.notes.append(
            "rewards: none could be taken over; name them here (`mm-grpo rewards` lists what ships)"
        )
    while True:
        try:
            GRPOConfig.from_dict(result.values)
            break
        except ConfigError as error:
            _omit_refused(result, error)
    result.notes[:0] = [
        f"{path}: {trainer}'s default ({key})" for path, key in result.origin.items() if key in defaults
    ]
    result.values = _without_empty(result.values)
    return result


def _omit_refused(result: Conversion, error: ConfigError) -> None:
    """Omit the field that an error begins with; its first line is the reason. Raises the error if there is none."""
    line = str(error).splitlines()[0]
    match = re.match(r"([\w.]+?)(?:\[\d+\])?(?: =|:) ", line)
    *sections, name = path = (match[1] if match else "").split(".")
    section = functools.reduce(lambda inner, part: inner.get(part, {}), sections, result.values)
    if name not in section or path == ["model", "path"]:
        raise error
    del section[name]
    dotted = ".".join(path)
    result.omitted[result.origin.pop(dotted, dotted)] = line


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    pruned = {
        key: _without_empty(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    return {key: value for key, value in pruned.items() if value not in ({}, [])}


def _interpolated(value: Any, foreign: Mapping[str, Any]) -> Any:
    """Return a text with the values of other keys in the place of ${section.key}."""
    if not isinstance(value, str):
        return value
    text = re.sub(r"\$\{([\w.]+)\}", lambda match: str(foreign.get(match[1], match[0])), value)
    unknown = re.search(r"\$\{[^}]*\}?", text)
    return Unexpanded.of(text, unknown[0]) if unknown else value if text == value else text


def _count_devices(result: Conversion) -> None:
    """Take the number of processes from the launcher's options, or from the GPUs that the script names."""
    visible = str(result.foreign.get("cuda_visible_devices", "0"))
    named = "nproc_per_node num_processes num_gpus"
    counted = (
        1 if result.trainer == "ms-swift" else len(visible.split(","))
    )  # which starts one without NPROC_PER_NODE
    try:
        nodes = 1 if result.find("num_processes") else result.number("nnodes", 1)
        result.devices = int(result.number(named, counted) * nodes)
    except (_UnknownValue, ConfigError):
        result.notes.append(
            "rollout.prompts_per_step: of one process; the file does not say how many: give --devices"
        )
    if result.devices > 1:
        result.notes.append(
            f"rollout.prompts_per_step: of {result.devices} processes, which the file names (--devices)"
        )


NEEDLESS: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0, 1), "top_k": (0, None, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0, 1),
    "vllm_tensor_parallel_size": (1,), "resume_from_checkpoint": (None, False), "use_peft": (False,),
    "load_in_4bit": (False,), "push_to_hub": (False,), "lora_dropout": (0, 0.0), "bf16": (True,),
    "save_strategy": ("steps",), "eval_strategy": ("steps",), "num_train_epochs": (1,), "report_to": ("none",),
    "rlhf_type": ("grpo",), "val_before_train": (True,), "val_only": (False,), "truncation": ("error",),
    "limit_images": (0,), "loss_mode": ("vanilla",), "actor.loss_type": ("default",), "dynamic_sample": (False,),
    "online_filtering": (False,), "filter_groups.enable": (False,), "norm_adv_by_std_in_grpo": (True,),
    "total_epochs": (1,), "model_revision": ("main",), "use_hf": (True,), "do_train": (True,), "do_sample": (True,),
    "eval_on_start": (True,), "use_vllm": (False,), "split_dataset_ratio": (0,), "lora.rank": (0,), "exclude_modules":
    (".*visual.*",), "model.lora_rank": (0,), "entropy_coeff": (0,), "filter_overlong_prompts": (False,),
}  # fmt: skip
"""Values of keys, by the end of their names, that ask for what mm_grpo does anyway."""
READ_BY_RULES = dict.fromkeys((
    "vllm_mode vllm_importance_sampling_correction vllm_importance_sampling_mode reward_weights dataset_config "
    "dataset_train_split dataset_test_split lora_r lora_rank lora_alpha lora_target_modules target_modules lora.alpha "
    "lora.target_modules nproc_per_node num_processes nnodes cuda_visible_devices soft_max_length soft_cache_length "
    "repetition_n_grams repetition_max_penalty max_resample_times max_try_make_batch filter_groups.max_num_gen_batches "
    "custom_reward_function.name model.lora_alpha model.target_modules"
).split(), True)  # fmt: skip
"""Keys that the rule of another key reads, by the end of their names."""


def _convert_key(result: Conversion, key: str, value: Any) -> str | None:
    """Convert one key; return the reason if it cannot be."""
    if isinstance(value, Unexpanded):
        return f"holds {value.unknown}, which this file does not say; write the value"
    paths, row = [name for name, _ in leaves(GRPOConfig)], row_of(key)
    in_section = not PARTS.keys().isdisjoint(key.split("."))
    if value is None or value in (by_end(key, NEEDLESS) or ()) or by_end(key, READ_BY_RULES) is not None:
        return None
    if not in_section and (rule := by_end(key, KEY_RULES)) is not None:
        try:
            return rule(result, value)
        except _UnknownValue as error:
            return str(error)
    matches = [path for path in paths if path.rpartition(".")[2] == key]
    path = row.path if row is not None else min(matches, key=lambda match: match.count("."), default=None)
    if path is None:
        return advice_on(key, paths) or "mm_grpo knows no such key; `mm-grpo config` shows every field"
    result.put(path, value)
    return None


def _batch(result: Conversion, value: Any) -> str | None:
    generations = result.number("num_generations", 8)
    prompts, updates = Fraction(result.generation) / Fraction(generations), result.updates
    if prompts.denominator > 1 or updates.denominator > 1:
        return (
            f"{result.generation} completions a step make {prompts} groups of {generations} and {updates} updates, "
            "which are no whole numbers; give --devices, or set rollout.prompts_per_step and optim.updates_per_step"
        )
    result.put("rollout.prompts_per_step", int(prompts))
    result.put("optim.updates_per_step", int(updates))
    return None


def _steps(path: str) -> Rule:
    """Return the rule that converts a number of updates to steps."""

    def rule(result: Conversion, value: Any) -> str | None:
        if not is_number(value) or 0 < value < 1:
            return f"is {shown(value)}; {path} is a number of steps"
        if value <= 0 and path == "run.max_steps":
            return None  # -1, which is the length of num_train_epochs
        steps = Fraction(value) / result.updates / Fraction(result.number("num_iterations", 1))
        result.put(path, max(1, int(steps)) if value else 0)
        if steps.denominator > 1:
            result.notes.append(f"{path}: {value} updates are {float(steps):g} steps, rounded down")
        return None

    return rule


def _epochs(result: Conversion, value: Any) -> str | None:
    if result.number("max_steps total_training_steps", -1) > 0:
        return None  # it ends the run there too
    prompts = result.values.get("rollout", {}).get("prompts_per_step", "rollout.prompts_per_step")
    return (
        f"write run.max_steps (steps, not epochs; null is one pass over the data): {value} x rows / {prompts}"
    )


def _mini_batch(result: Conversion, value: Any) -> str | None:
    if result.updates.denominator > 1:
        return f"is no divisor of {result.number(_PROMPTS, 1)} prompts a step; set optim.updates_per_step"
    result.put("optim.updates_per_step", int(result.updates))
    return None


def _warmup(result: Conversion, value: Any) -> str | None:
    if not is_number(value) or value <= 0:
        return None
    total, scale = result.number("max_steps total_training_steps", -1), Fraction(1)
    if result.trainer in DOTTED:
        scale = result.updates * int(result.number("actor.ppo_epochs", 1))
    if value < 1 and total <= 0:
        return "the length of the run is not known; write optim.warmup_steps (updates)"
    result.put("optim.warmup_steps", int((value * total if value < 1 else value) * scale))
    return None


def _frequency(path: str) -> Rule:
    """Return the rule of a number of steps that is 0 or less for never."""
    return lambda result, value: result.put(path, max(0, value) if is_number(value) else value)


def _system(result: Conversion, value: Any) -> str | None:
    if str(value).endswith(".txt"):
        return "its text is in another file; write it into data.system_prompt"
    result.put("data.system_prompt", str(value))
    return None


def _trackers(result: Conversion, value: Any) -> str | None:
    names = [name for name in (value if isinstance(value, list) else [value]) if name not in _UNTRACKED]
    legal = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    result.put("run.trackers", legal)
    unknown = ", ".join(str(name) for name in names if name not in legal)
    return (
        f"no tracker here is named {unknown}; run.trackers has tensorboard, wandb and trackio"
        if unknown
        else None
    )


_UNTRACKED = ("none", "console", "file")


def _vllm(result: Conversion, value: Any) -> str | None:
    served = result.find("vllm_mode") == "server"
    result.put("rollout.engine", "vllm_server" if served else "vllm")
    if result.trainer == "TRL" and result.find("vllm_importance_sampling_correction", True):
        mode = result.find("vllm_importance_sampling_mode", "sequence_mask")
        result.put("algorithm.importance_sampling_mode", mode)
    return None


def _engine(result: Conversion, value: Any) -> str | None:
    result.put("rollout.engine", "transformers" if value == "hf" else "vllm")
    return None if value in ("vllm", "hf") else f"there is no {value} here; rollout.engine: vllm is written"


def _rewards(result: Conversion, value: Any) -> str | None:
    names, weights = value if isinstance(value, list) else [value], result.find("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [None] * len(names)
    entries: list[Any] = []
    for name, weight in zip(names, weights, strict=True):
        module, _, function = str(name).rpartition(".")
        if entry := REWARDS.get(name, f"{module}:{function}" if module else None):
            found = {ours: result.find(ends) for ours, ends in REWARD_OPTIONS.get(entry, {}).items()}
            options = {ours: option for ours, option in found.items() if option is not None}
            options |= {} if weight is None else {"weight": float(weight)}
            entries.append({"name": entry, **options} if options else entry)
    result.put("rewards", entries)
    unknown = ", ".join(str(name) for name in names if name not in REWARDS and "." not in str(name))
    return f"no reward here is named {unknown}; write path/to/file.py:function" if unknown else None


REWARD_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "soft_overlong": {"max_length": "soft_max_length max_completion_length", "buffer": "soft_cache_length"},
    "repetition_penalty": {"ngram": "repetition_n_grams", "max_penalty": "repetition_max_penalty"},
}
"""Arguments of our rewards, and the keys that give them."""


def _reward_file(result: Conversion, value: Any) -> str | None:
    file, colon, name = str(value).rpartition(":") if ".py:" in str(value) else (str(value), "", "")
    name = name or result.find(
        "custom_reward_function.name", "main" if result.trainer == "EasyR1" else "compute_score"
    )
    result.put("rewards", [f"{file}:{name}"])
    result.notes.append(
        f"rewards: {name} has another signature in {result.trainer}; here it is (completion, answer), or other columns "
        "by name, and returns a number (docs/rewards.md)"
    )
    return None


def _dataset(result: Conversion, value: Any) -> str | None:
    if Path(str(value)).suffix:
        result.put("data.train", str(value))
        return None
    config = result.find("dataset_config")
    hub = f"{value}:{config}" if config else str(value)
    result.put("data.train", f"{hub}:{result.find('dataset_train_split', 'train')}")
    if result.find("eval_strategy", "no") != "no":
        result.put("data.eval", f"{hub}:{result.find('dataset_test_split', 'test')}")
    return None


def _rows(path: str) -> Rule:
    """Return the rule of one or several sources of rows."""

    def rule(result: Conversion, value: Any) -> str | None:
        lost: list[str] = []
        sources = [_source(str(text), lost) for text in (value if isinstance(value, list) else [value])]
        result.put(path, sources if isinstance(value, list) else sources[0])
        return "; ".join(lost) or None

    return rule


def _source(text: str, lost: list[str]) -> str:
    """Return our name of ms-swift's hub::name:subset#rows, or EasyR1's name@split; what that loses goes into `lost`."""
    if Path(text).expanduser().exists():
        return text
    hub, name, subset, split, rows = re.fullmatch(  # type: ignore[union-attr]
        r"(?:(hf|ms)::)?(.*?)(?::([^/:#@]+(?:/[^/:#@]+)*))?(?:@(\w+))?(?:#(\d+))?",
        text,
        re.DOTALL | re.IGNORECASE,
    ).groups()
    if hub and hub.lower() == "ms":
        lost.append(f"{name} is asked of Hugging Face's hub, not of ModelScope's")
    if rows:
        lost.append(f"every row is read, not {rows}; write those rows into a file of their own")
    if Path(name).suffix in (".json", ".jsonl", ".csv", ".parquet", ".arrow") or subset == "default":
        return name
    if subset and "/" in subset:
        lost.append(f"one of the subsets {subset} is named by {name}:SUBSET:train; list the others")
        return name
    if subset:
        return f"{name}:{subset}" + ("" if subset in ("train", "test", "validation", "val") else ":train")
    return f"{name}:{split}" if split else name


def _column(ours: str) -> Rule:
    """Return the rule of a column's name."""
    same = {ours, ours.rstrip("s")}
    return lambda result, value: None if value in same else result.put(f"data.columns.{ours}", value)


def _columns(result: Conversion, value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return "write data.columns (our name: the dataset's column)"
    names = {"query": "prompt", "image": "images"}
    result.put("data.columns", {names.get(ours, ours): theirs for theirs, ours in value.items()})
    return None


def _kl(result: Conversion, value: Any) -> str | None:
    in_loss = result.find("use_kl_loss", False) and not result.find("disable_kl", False)
    in_reward = result.find("use_kl_in_reward", False)
    if result.trainer == "EasyR1":
        in_reward = not in_loss and not result.find("disable_kl", False)
    if in_loss and in_reward:
        return "the KL is in the loss or in the reward: write algorithm.beta, and algorithm.kl_in_reward for the latter"
    names = (
        ("kl_loss_coef", "kl_loss_type low_var_kl")
        if in_loss and result.trainer == "verl"
        else ("kl_coef", "kl_penalty kl")
    )
    estimator = result.find(names[1].split()[0], names[1].split()[1])
    beta = result.find(names[0], 0.001)
    if not (in_loss or in_reward) or not beta:
        return None
    result.put("algorithm.beta", beta)
    if in_reward:
        result.put("algorithm.kl_in_reward", True)
    result.put("algorithm.kl_estimator", KL_ESTIMATORS.get(estimator, estimator))
    return None


KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSSES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("token-mean", "token"), ("algorithm.loss_type", "dapo")),
    **dict.fromkeys(("seq-mean-token-mean", "seq"), ("algorithm.loss_type", "grpo")),
    "seq-mean-token-sum": ("algorithm.loss_type", "luspo"),
    "seq-mean-token-sum-norm": ("algorithm.loss_type", "dr_grpo"),
    **dict.fromkeys(("gspo", "gspo_token"), ("algorithm.importance_sampling_level", "sequence")),
    "geo_mean": ("algorithm.loss_type", "gmpo"),
    **{name: ("algorithm.loss_type", name) for name in ("cispo", "sapo", "dppo_tv", "dppo_kl")},
}
"""Ways to average the loss and kinds of it in verl and EasyR1: our field, and its value."""


def _loss(result: Conversion, value: Any) -> str | None:
    kind = LOSSES.get(str(result.find("policy_loss.loss_mode worker.actor.loss_type", "")))
    if value not in LOSSES:
        return "write algorithm.loss_type"
    path, name = LOSSES[value]
    if kind and kind[0] == path and kind[1] != name:
        return f"algorithm.loss_type = {kind[1]} has an average of its own"
    result.put(path, name)
    return None


def _clip_high(result: Conversion, value: Any) -> str | None:
    cispo = result.find("policy_loss.loss_mode worker.actor.loss_type") == "cispo"
    result.put("algorithm.epsilon_high", 1 + value if cispo and is_number(value) else value)
    return None


def _clip(result: Conversion, value: Any) -> str | None:
    if result.find("clip_ratio_low") is None:
        result.put("algorithm.epsilon", value)
    return None


def _attempts(result: Conversion, value: Any) -> str | None:
    extra = 1 if result.trainer == "ms-swift" else 0
    ends = "max_try_make_batch filter_groups.max_num_gen_batches max_resample_times"
    attempts = int(result.find(ends, {"EasyR1": 20, "ms-swift": 3}.get(result.trainer, 0)))
    result.put("rollout.max_attempts", attempts + extra if attempts > 0 else 20)
    if attempts <= 0:
        result.notes.append("rollout.max_attempts: without a limit there; 20 here")
    return None


def _generations(result: Conversion, value: Any) -> str | None:
    if is_number(value) and value < 2:
        return "GRPO compares the completions of a prompt: write rollout.num_generations, 2 or more"
    result.put("rollout.num_generations", value)
    return None


def _put(path: str, values: Mapping[Any, Any] | None = None) -> Rule:
    """Return the rule that puts a value; `values` are ours by theirs, and the value is omitted if it is none of them."""

    def rule(result: Conversion, value: Any) -> str | None:
        if values is not None and value not in values:
            return f"write {path}: {' or '.join(dict.fromkeys(map(str, values.values())))}"
        result.put(path, value if values is None else values[value])
        return None

    return rule


def _betas(result: Conversion, value: Any) -> str | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return "write optim.adam_beta1 and optim.adam_beta2"
    result.put("optim.adam_beta1", value[0])
    result.put("optim.adam_beta2", value[1])
    return None


def _lora(result: Conversion, value: Any) -> str | None:
    if value in (True, "lora") or is_number(value):
        scripts = value is True  # of TRL, whose default rank is 16
        rank = value if is_number(value) else result.number("lora_r lora_rank", 16 if scripts else 8)
        alpha = {"verl": 16, "EasyR1": 64}.get(result.trainer, 32)
        section = {"rank": rank, "alpha": result.number("lora_alpha lora.alpha", alpha)}
        modules = result.find("lora_target_modules target_modules", None if scripts else "all-linear")
        if modules is not None:
            names = (
                modules if isinstance(modules, list) else [name.strip() for name in str(modules).split(",")]
            )
            section["target_modules"] = "all-linear" if names == ["all-linear"] else names
        else:
            result.notes.append(
                "model.lora.target_modules: ours; PEFT's, without a name, depend on the model"
            )
        result.put("model.lora", section)
    return (
        None
        if value in (True, "lora", "full") or is_number(value)
        else "model.lora trains adapters; null every weight"
    )


_BATCH = [
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
]
DOTTED = ("verl", "EasyR1")
"""Trainers whose keys are in sections."""
_PROMPTS, _MINI_BATCH = (
    "data.train_batch_size data.rollout_batch_size",
    "actor.ppo_mini_batch_size actor.global_batch_size",
)
_KL = "use_kl_loss use_kl_in_reward disable_kl kl_loss_coef kl_coef kl_penalty kl_loss_type"
KEY_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_BATCH, _batch),
    **dict.fromkeys(_MINI_BATCH.split(), _mini_batch),
    **dict.fromkeys(_KL.split(), _kl),
    **dict.fromkeys(("loss_agg_mode", "loss_avg_mode", "loss_mode", "actor.loss_type"), _loss),
    "clip_ratio": _clip,
    "clip_ratio_high": _clip_high,
    **dict.fromkeys(("online_filtering", "filter_groups.enable", "dynamic_sample"), _attempts),
    "max_steps": _steps("run.max_steps"),
    "trainer.max_steps": _put("run.max_steps"),
    "save_steps": _steps("run.save_every"),
    "eval_steps": _steps("run.eval_every"),
    "save_freq": _frequency("run.save_every"),
    **dict.fromkeys(("test_freq", "val_freq"), _frequency("run.eval_every")),
    **dict.fromkeys("num_train_epochs total_epochs total_episodes max_epochs".split(), _epochs),
    **dict.fromkeys(
        "warmup_steps warmup_ratio lr_warmup_steps lr_warmup_ratio lr_warmup_steps_ratio".split(), _warmup
    ),
    **dict.fromkeys(("report_to", "trainer.logger"), _trackers),
    "use_vllm": _vllm,
    "rollout.name": _engine,
    "rollout.n": _generations,
    "rollout_is": _put(
        "algorithm.importance_sampling_mode", {n: f"{n}_truncate" for n in ("token", "sequence")}
    ),
    "norm_adv_by_std_in_grpo": _put("algorithm.scale_rewards", {False: "none"}),
    "reward_funcs": _rewards,
    **dict.fromkeys(("reward_function", "score_function", "custom_reward_function.path"), _reward_file),
    "dataset_name": _dataset,
    **dict.fromkeys(("dataset", "train_files"), _rows("data.train")),
    **dict.fromkeys(("val_dataset", "val_files"), _rows("data.eval")),
    **dict.fromkeys(("prompt_key", "dataset_prompt_column"), _column("prompt")),
    "answer_key": _column("answer"),
    "image_key": _column("images"),
    "columns": _columns,
    "filter_overlong_prompts": _put("data.on_overlong", {True: "drop"}),
    "truncation_strategy": _put("data.on_overlong", {"delete": "drop", "error": "stop"}),
    "enable_thinking": _put("data.chat_template_kwargs.enable_thinking"),
    "betas": _betas,
    **dict.fromkeys("use_peft train_type tuner_type model.lora_rank lora.rank".split(), _lora),
    "system": _system,
}

EPOCHS = {"TRL": 3, "ms-swift": 3, "verl": 30, "EasyR1": 15}
_ACTOR = "actor_rollout_ref.actor."
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"lr_scheduler_type": "linear"},
    "ms-swift": {
        "loss_type": "grpo", "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "beta": 0.04,
        "temperature": 0.9, "tuner_type": "lora", "freeze_vit": True, "per_device_train_batch_size": 1,
        "rollout_importance_sampling_mode": "none",
    },
    "verl": {
        "data.train_batch_size": 1024, "data.max_prompt_length": 512, "algorithm.adv_estimator": "gae",
        f"{_ACTOR}ppo_mini_batch_size": 256, f"{_ACTOR}clip_ratio_c": 3.0, f"{_ACTOR}optim.weight_decay": 0.01,
        "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": 1,
    },
    "EasyR1": {
        "data.rollout_batch_size": 512, "data.max_prompt_length": 512, "data.min_pixels": 262144, "data.seed": 1,
        "data.max_pixels": 4194304, "data.filter_overlong_prompts": True, "algorithm.kl_coef": 0.001,
        "worker.actor.global_batch_size": 256, "worker.actor.clip_ratio_high": 0.3, "worker.actor.clip_ratio_dual": 3.0,
        "worker.actor.optim.weight_decay": 0.01, "worker.rollout.name": "vllm", "worker.rollout.n": 1,
    },
}  # fmt: skip
"""Values that a trainer takes for absent keys, if they differ from ours: TRL 1.16, ms-swift 4.6, verl 0.9.1, EasyR1."""


def _foreign_defaults(foreign: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """Return a trainer's values for absent keys that differ from ours."""
    defaults = dict(DEFAULTS[trainer])
    if trainer == "ms-swift" and "full" in (foreign.get("train_type"), foreign.get("tuner_type")):
        defaults["learning_rate"] = 1e-5
    if "train_type" in foreign:
        defaults.pop("tuner_type", None)
    if trainer == "TRL" and not foreign.keys() & set(_BATCH):
        defaults["per_device_train_batch_size"] = 8
    kind = foreign.get(f"{_ACTOR}policy_loss.loss_mode", foreign.get("worker.actor.loss_type", "default"))
    if kind not in ("vanilla", "default"):  # without a second bound
        defaults = {
            key: value for key, value in defaults.items() if "clip_ratio_" not in key or "high" in key
        }
    return {key: value for key, value in defaults.items() if key not in foreign}
