"""Convert a config of TRL (its script arguments), ms-swift or verl to ours: `mm-grpo convert`.

Each key is converted, needless, or omitted with a reason; none is dropped in silence. Defaults of TRL and ms-swift that
differ from ours are written out (`_foreign_defaults`). The table of keys is in `keys`; here are the rules of keys that
need arithmetic, or that depend on others.

TRL's `max_steps`, `save_steps` and `eval_steps` count optimizer updates, ours count steps, which make several; its
batches are per device, ours are whole. With S = steps_per_generation, A = gradient_accumulation_steps and
B = per_device_train_batch_size x S x devices: P = B / G, and a step makes S / A updates, num_iterations times.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from mm_grpo.config.grpo_config import WITHOUT_KEYS, GRPOConfig
from mm_grpo.config.messages import shown
from mm_grpo.config.section import leaves
from mm_grpo.config.yaml_file import set_value, write_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.migrate.keys import REWARDS, advice_on, row_of
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

    def number(self, key: str, default: Any) -> Any:
        """Return the number at a key. Raises ConfigError unless it is above 0; steps may be -1."""
        value = self.foreign.get(key, default)
        if not is_number(value) or not (value > 0 or value == -1):
            raise ConfigError(f"{key} = {shown(value)}: must be a number above 0")
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
        """TRL's optimizer updates in one of our steps, of one iteration."""
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


def convert(config: Mapping[str, Any], *, devices: int = 1) -> Conversion:
    """Convert a config of another trainer. `devices` is the number of processes that its batches are multiplied by.

    Raises ConfigError if a key cannot have its value, or if the result is no valid config.
    """
    nested = any(key.partition(".")[0] in ("actor_rollout_ref", "worker") for key in config)
    trainer = "" if nested else "ms-swift" if "rlhf_type" in config else "TRL"
    foreign = _flatten(config)
    defaults = _foreign_defaults(foreign, trainer, devices)
    result = Conversion({**defaults, **foreign}, devices)
    for key, value in result.foreign.items():
        result.key = key
        if (why := _convert_key(result, key, value)) is not None:
            result.omitted[key] = why
    origin = result.origin.items()
    result.notes += [f"{path}: {trainer}'s default ({key})" for path, key in origin if key in defaults]
    if trainer and not foreign.keys() & {"max_steps", "num_train_epochs"}:
        result.notes.append(f"run.max_steps: {trainer}'s default is 3 epochs; null is one pass over the data")
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
            return result
        except ConfigError as error:
            _omit_refused(result, error)


def _omit_refused(result: Conversion, error: ConfigError) -> None:
    """Omit the field that an error begins with; its first line is the reason. Raises the error if there is none."""
    line = str(error).splitlines()[0]
    match = re.match(r"([\w.]+?)(?:\[\d+\])?(?: =|:) ", line)
    *sections, name = path = (match[1] if match else "").split(".")
    section = functools.reduce(lambda inner, part: inner.get(part, {}), sections, result.values)
    if name not in section or path == ["model", "path"]:
        raise error
    del section[name]
    result.omitted[result.origin.get(".".join(path), ".".join(path))] = line


def _flatten(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return values by dotted key. Mappings that are values themselves stay."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{section}.{key}" if section else str(key)
        is_value = re.search(r"columns$|(template|init|generation|scheduler)_kwargs$", path)
        nested = isinstance(value, Mapping) and value and not is_value
        flat |= _flatten(value, path) if nested else {path: value}
    return flat


NEEDLESS: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0, 1), "top_k": (0, None, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0, 1),
    "vllm_tensor_parallel_size": (1,), "resume_from_checkpoint": (None, False), "use_peft": (False,),
    "load_in_4bit": (False,), "push_to_hub": (False,), "lora_dropout": (0, 0.0), "bf16": (True,),
    "save_strategy": ("steps",), "eval_strategy": ("steps",), "num_train_epochs": (1,), "report_to": ("none",),
}  # fmt: skip
"""Values of keys that ask for what mm_grpo does anyway."""
READ_BY_RULES = (
    "vllm_mode vllm_importance_sampling_correction vllm_importance_sampling_mode reward_weights dataset_config "
    "dataset_train_split dataset_test_split lora_r lora_rank lora_alpha lora_target_modules target_modules"
)
"""Keys that the rule of another key reads."""


def _convert_key(result: Conversion, key: str, value: Any) -> str | None:
    """Convert one key; return the reason if it cannot be."""
    if value in NEEDLESS.get(key, ()) or key in READ_BY_RULES.split():
        return None
    if key in KEY_RULES:
        return KEY_RULES[key](result, value)
    paths = [name for name, _ in leaves(GRPOConfig)]
    row, matches = row_of(key), [path for path in paths if path.rpartition(".")[2] == key]
    path = row.path if row is not None else min(matches, key=lambda match: match.count("."), default=None)
    if path is None:
        return advice_on(key, paths) or "mm_grpo knows no such key; `mm-grpo config` shows every field"
    if value is not None:
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


def _warmup(result: Conversion, value: Any) -> str | None:
    total = result.number("max_steps", -1)
    if 0 < value < 1 and total <= 0:
        return "the length of the run is not known; write optim.warmup_steps (updates)"
    if value:
        result.put("optim.warmup_steps", int(value * total) if value < 1 else int(value))
    return None


def _system(result: Conversion, value: Any) -> str | None:
    if str(value).endswith(".txt"):
        return "its text is in another file; write it into data.system_prompt"
    result.put("data.system_prompt", value)
    return None


def _trackers(result: Conversion, value: Any) -> str | None:
    result.put("run.trackers", value if isinstance(value, list) else [value])
    return None


def _vllm(result: Conversion, value: Any) -> str | None:
    if value:
        served = result.foreign.get("vllm_mode") == "server"
        result.put("rollout.engine", "vllm_server" if served else "vllm")
        if result.foreign.get("vllm_importance_sampling_correction", True):
            mode = result.foreign.get("vllm_importance_sampling_mode", "sequence_mask")
            result.put("algorithm.importance_sampling_mode", mode)
    return None


def _rewards(result: Conversion, value: Any) -> str | None:
    names, weights = value if isinstance(value, list) else [value], result.foreign.get("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [None] * len(names)
    entries: list[Any] = []
    for name, weight in zip(names, weights, strict=True):
        module, _, function = str(name).rpartition(".")
        if entry := REWARDS.get(name, f"{module}:{function}" if module else None):
            entries.append(entry if weight is None else {"name": entry, "weight": float(weight)})
    result.put("rewards", entries)
    unknown = ", ".join(str(name) for name in names if name not in REWARDS and "." not in str(name))
    return f"no reward here is named {unknown}; write path/to/file.py:function" if unknown else None


def _dataset(result: Conversion, value: Any) -> str | None:
    if Path(str(value)).suffix:
        result.put("data.train", str(value))
        return None
    config = result.foreign.get("dataset_config")
    hub = f"{value}:{config}" if config else str(value)
    result.put("data.train", f"{hub}:{result.foreign.get('dataset_train_split', 'train')}")
    if result.foreign.get("eval_strategy", "no") != "no":
        result.put("data.eval", f"{hub}:{result.foreign.get('dataset_test_split', 'test')}")
    return None


def _lora(result: Conversion, value: Any) -> str | None:
    if value in (True, "lora"):
        rank = result.number("lora_r", result.number("lora_rank", 16 if value is True else 8))
        section = {"rank": rank, "alpha": result.number("lora_alpha", 32)}
        modules = result.foreign.get("lora_target_modules", result.foreign.get("target_modules"))
        if isinstance(modules, list) and modules != ["all-linear"]:
            section["target_modules"] = modules
        result.put("model.lora", section)
    return None if value in (True, "lora", "full") else "model.lora trains adapters; null every weight"


_BATCH = [
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
]
KEY_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_BATCH, _batch),
    "max_steps": _steps("run.max_steps"),
    "save_steps": _steps("run.save_every"),
    "eval_steps": _steps("run.eval_every"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), _warmup),
    "report_to": _trackers,
    "use_vllm": _vllm,
    "reward_funcs": _rewards,
    "dataset_name": _dataset,
    **dict.fromkeys(("use_peft", "train_type", "tuner_type"), _lora),
    "system": _system,
}


def _foreign_defaults(foreign: Mapping[str, Any], trainer: str, devices: int) -> dict[str, Any]:
    """Return a trainer's values for absent keys that differ from ours."""
    defaults: dict[str, Any] = {"lr_scheduler_type": "linear"} if trainer == "TRL" else {}
    if trainer == "ms-swift":
        defaults = {
            "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "beta": 0.04, "temperature": 0.9,
            "train_type": foreign.get("tuner_type", "lora"), "per_device_train_batch_size": 1,
        }  # fmt: skip
        if "full" in (foreign.get("train_type"), foreign.get("tuner_type")):
            defaults["learning_rate"] = 1e-5
        batch = (
            Conversion({**defaults, **foreign}, devices).number("per_device_train_batch_size", 1) * devices
        )
        defaults["gradient_accumulation_steps"] = max(1, ceil(16 / batch))
    if trainer == "TRL" and not foreign.keys() & set(_BATCH):
        defaults["per_device_train_batch_size"] = 8
    return {key: value for key, value in defaults.items() if key not in foreign}
