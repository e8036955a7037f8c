"""A config of TRL (its script arguments), ms-swift or verl as one of ours: `mm-grpo convert`.

Each key is taken over, found needless, or left out with a reason; none is dropped in silence. What TRL or ms-swift do
where a key is absent, and mm_grpo would do otherwise, is written out (`_assumed`). The table of keys is in `keys`; here
are the rules of those that need arithmetic, or that depend on others.

Words of TRL that mean something else here: its `max_steps`, `save_steps` and `eval_steps` count optimizer updates, ours
count steps, which make several; its batches are per device, ours are whole. With S = steps_per_generation,
A = gradient_accumulation_steps and B = per_device_train_batch_size x S x devices: P = B / G, and a step makes S / A
updates, num_iterations times.
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
"""Stands in `model.path` where the file names no model."""

Rule = Callable[["Conversion", Any], "str | None"]
"""Takes a value over; returns why it could not."""


@dataclass
class Conversion:
    """What became of a config. `given` are its keys, dotted, and what its trainer takes for absent ones; `values` ours;
    `left` reasons by key; `notes` what was written that no key said."""

    given: dict[str, Any]
    devices: int
    values: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    key: str = ""
    """The key that is being taken over."""
    origin: dict[str, str] = field(default_factory=dict)
    """The key that each of our fields is from."""

    def put(self, path: str, value: Any) -> None:
        set_value(self.values, path.split("."), value, path)
        self.origin[path] = self.key

    def number(self, key: str, default: Any) -> Any:
        """The number at a key. ConfigError where it is no number above 0 or, of steps, -1."""
        value = self.given.get(key, default)
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
        """Our config, with what was left out as comments behind it."""
        ordered = {name: self.values[name] for name in GRPOConfig.model_fields if name in self.values}
        given, kept = redact(self.given), redact(ordered)
        lines = [WITHOUT_KEYS * (kept != ordered) + write_yaml(kept).rstrip("\n")]
        left = [f"{key} = {shown(given.get(key))}: {why}" for key, why in self.left.items()]
        for title, entries in (("Written although no key said it:", self.notes), ("Not taken over:", left)):
            shown_entries = [printable(redact(entry), lines=False) for entry in entries]
            lines += ["", f"# {title}", *(f"#   {entry}" for entry in shown_entries)] if entries else []
        return "\n".join(lines) + "\n"


def convert(given: Mapping[str, Any], *, devices: int = 1) -> Conversion:
    """Ours for the keys of another trainer. `devices` is the number of processes that its batches are multiplied by.

    Raises ConfigError where a value is none that its key can have, or what comes out is no valid config.
    """
    nested = any(key.partition(".")[0] in ("actor_rollout_ref", "worker") for key in given)
    trainer = "" if nested else "ms-swift" if "rlhf_type" in given else "TRL"
    theirs = _flat(given)
    assumed = _assumed(theirs, trainer, devices)
    found = Conversion({**assumed, **theirs}, devices)
    for key, value in found.given.items():
        found.key = key
        if (why := _take(found, key, value)) is not None:
            found.left[key] = why
    found.notes += [
        f"{path}: {trainer}'s default ({key})" for path, key in found.origin.items() if key in assumed
    ]
    if trainer and not theirs.keys() & {"max_steps", "num_train_epochs"}:
        found.notes.append(f"run.max_steps: {trainer}'s default is 3 epochs; null is one pass over the data")
    if not found.values.get("model", {}).get("path"):
        found.put("model.path", NO_MODEL)
        found.notes.append(f"model.path: the file names no model; write its name in place of {NO_MODEL}")
    if not found.values.get("rewards"):
        found.notes.append(
            "rewards: none could be taken over; name them here (`mm-grpo rewards` lists what ships)"
        )
    while True:  # fields that are refused are taken back, one after the other, with what is said of them
        try:
            GRPOConfig.from_dict(found.values)
            return found
        except ConfigError as error:
            _take_back(found, str(error).splitlines()[0], error)


def _take_back(found: Conversion, line: str, error: ConfigError) -> None:
    match = re.match(r"([\w.]+?)(?:\[\d+\])?(?: =|:) ", line)
    *sections, name = path = (match[1] if match else "").split(".")
    holder = functools.reduce(lambda inner, part: inner.get(part, {}), sections, found.values)
    if name not in holder or path == ["model", "path"]:
        raise error
    del holder[name]
    found.left[found.origin.get(".".join(path), ".".join(path))] = line


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{above}.{key}" if above else str(key)
        whole = re.search(r"columns$|(template|init|generation|scheduler)_kwargs$", path)
        found |= _flat(value, path) if isinstance(value, Mapping) and value and not whole else {path: value}
    return found


NEEDLESS: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0, 1), "top_k": (0, None, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0, 1),
    "vllm_tensor_parallel_size": (1,), "resume_from_checkpoint": (None, False), "use_peft": (False,),
    "load_in_4bit": (False,), "push_to_hub": (False,), "lora_dropout": (0, 0.0), "bf16": (True,),
    "save_strategy": ("steps",), "eval_strategy": ("steps",), "num_train_epochs": (1,), "report_to": ("none",),
}  # fmt: skip
"""Values at which a key asks for nothing that differs here."""
READ_ELSEWHERE = (
    "vllm_mode vllm_importance_sampling_correction vllm_importance_sampling_mode reward_weights dataset_config "
    "dataset_train_split dataset_test_split lora_r lora_rank lora_alpha lora_target_modules target_modules"
)
"""Keys that the rule of another one reads."""


def _take(found: Conversion, key: str, value: Any) -> str | None:
    """Take one key over; the reason where it cannot be."""
    if value in NEEDLESS.get(key, ()) or key in READ_ELSEWHERE.split():
        return None
    if key in RULES:
        return RULES[key](found, value)
    known = [name for name, _ in leaves(GRPOConfig)]
    row, homes = row_of(key), [path for path in known if path.rpartition(".")[2] == key]
    path = row.path if row is not None else min(homes, key=lambda home: home.count("."), default=None)
    if path is None:
        return advice_on(key, known) or "mm_grpo knows no such key; `mm-grpo config` shows every field"
    if value is not None:
        found.put(path, value)
    return None


# Rules


def _batch(found: Conversion, value: Any) -> str | None:
    generations = found.number("num_generations", 8)
    prompts, updates = Fraction(found.generation) / Fraction(generations), found.updates
    if prompts.denominator > 1 or updates.denominator > 1:
        return (
            f"{found.generation} completions a step make {prompts} groups of {generations} and {updates} updates, which"
            " are no whole numbers; give --devices, or set rollout.prompts_per_step and optim.updates_per_step"
        )
    found.put("rollout.prompts_per_step", int(prompts))
    found.put("optim.updates_per_step", int(updates))
    return None


def _steps(path: str) -> Rule:
    """A number of updates as steps."""

    def rule(found: Conversion, value: Any) -> str | None:
        if not is_number(value) or 0 < value < 1:
            return f"is {shown(value)}; {path} is a number of steps"
        if value <= 0 and path == "run.max_steps":
            return None  # -1, which is the length of num_train_epochs
        steps = Fraction(value) / found.updates / Fraction(found.number("num_iterations", 1))
        found.put(path, max(1, int(steps)) if value else 0)
        if steps.denominator > 1:
            found.notes.append(f"{path}: {value} updates are {float(steps):g} steps, rounded down")
        return None

    return rule


def _warmup(found: Conversion, value: Any) -> str | None:
    total = found.number("max_steps", -1)
    if 0 < value < 1 and total <= 0:
        return "the length of the run is not known; write optim.warmup_steps (updates)"
    if value:
        found.put("optim.warmup_steps", int(value * total) if value < 1 else int(value))
    return None


def _system(found: Conversion, value: Any) -> str | None:
    if str(value).endswith(".txt"):
        return "its text is in another file; write it into data.system_prompt"
    found.put("data.system_prompt", value)
    return None


def _trackers(found: Conversion, value: Any) -> str | None:
    found.put("run.trackers", value if isinstance(value, list) else [value])
    return None


def _vllm(found: Conversion, value: Any) -> str | None:
    if value:
        served = found.given.get("vllm_mode") == "server"
        found.put("rollout.engine", "vllm_server" if served else "vllm")
        if found.given.get("vllm_importance_sampling_correction", True):
            mode = found.given.get("vllm_importance_sampling_mode", "sequence_mask")
            found.put("algorithm.importance_sampling_mode", mode)
    return None


def _rewards(found: Conversion, value: Any) -> str | None:
    named, weights = value if isinstance(value, list) else [value], found.given.get("reward_weights")
    weighted = weights if isinstance(weights, list) and len(weights) == len(named) else [None] * len(named)
    entries: list[Any] = []
    for name, weight in zip(named, weighted, strict=True):
        module, _, function = str(name).rpartition(".")
        if entry := REWARDS.get(name, f"{module}:{function}" if module else None):
            entries.append(entry if weight is None else {"name": entry, "weight": float(weight)})
    found.put("rewards", entries)
    unknown = ", ".join(str(name) for name in named if name not in REWARDS and "." not in str(name))
    return f"no reward here is named {unknown}; write path/to/file.py:function" if unknown else None


def _dataset(found: Conversion, value: Any) -> str | None:
    if Path(str(value)).suffix:
        found.put("data.train", str(value))
        return None
    config = found.given.get("dataset_config")  # of a dataset of the hub
    hub = f"{value}:{config}" if config else str(value)
    found.put("data.train", f"{hub}:{found.given.get('dataset_train_split', 'train')}")
    if found.given.get("eval_strategy", "no") != "no":
        found.put("data.eval", f"{hub}:{found.given.get('dataset_test_split', 'test')}")
    return None


def _lora(found: Conversion, value: Any) -> str | None:
    if value in (True, "lora"):
        rank = found.number("lora_r", found.number("lora_rank", 16 if value is True else 8))
        section = {"rank": rank, "alpha": found.number("lora_alpha", 32)}
        named = found.given.get("lora_target_modules", found.given.get("target_modules"))
        if isinstance(named, list) and named != ["all-linear"]:
            section["target_modules"] = named
        found.put("model.lora", section)
    return None if value in (True, "lora", "full") else "model.lora trains adapters; null every weight"


_BATCH = [
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
]
RULES: Mapping[str, Rule] = {
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


def _assumed(given: Mapping[str, Any], trainer: str, devices: int) -> dict[str, Any]:
    """What a trainer takes for keys that are absent, where mm_grpo would not."""
    found: dict[str, Any] = {"lr_scheduler_type": "linear"} if trainer == "TRL" else {}
    if trainer == "ms-swift":
        found = {
            "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "beta": 0.04, "temperature": 0.9,
            "train_type": given.get("tuner_type", "lora"), "per_device_train_batch_size": 1,
        }  # fmt: skip
        if "full" in (given.get("train_type"), given.get("tuner_type")):
            found["learning_rate"] = 1e-5
        batch = Conversion({**found, **given}, devices).number("per_device_train_batch_size", 1) * devices
        found["gradient_accumulation_steps"] = max(1, ceil(16 / batch))
    if trainer == "TRL" and not given.keys() & set(_BATCH):
        found["per_device_train_batch_size"] = 8
    return {key: value for key, value in found.items() if key not in given}
