"""A config of TRL (its script arguments), ms-swift or verl as one of ours: `mm-grpo convert`.

`files` reads it, `convert` makes ours of it. Each key is taken over, found needless, or left out with a reason; none is
dropped in silence. What TRL or ms-swift do where a key is absent, and mm_grpo would do otherwise, is written out
(ASSUMED). The table of keys is in `keys`; here are the rules of those that need arithmetic, or that depend on others.

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

from mm_grpo.config.grpo_config import GRPOConfig
from mm_grpo.config.messages import leaves
from mm_grpo.config.yaml_file import set_value, shown, write_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.migrate.files import Computed
from mm_grpo.migrate.keys import REWARDS, advice_on, row_of
from mm_grpo.terminal import printable, redact
from mm_grpo.types import is_number

NO_MODEL = "NAME_OF_THE_MODEL"
"""Stands in `model.path` where the file names no model."""

Rule = Callable[["Conversion", Any], "str | None"]
"""Takes a value over; returns why it could not."""


@dataclass
class Conversion:
    """What became of a config. `given` are its keys, dotted; `assumed` what its trainer takes for absent ones; `values`
    ours; `left` reasons by key; `notes` what was written that no key said."""

    given: dict[str, Any]
    devices: int = 1
    assumed: Mapping[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        set_value(self.values, path.split("."), value, path)

    def number(self, key: str, default: Any) -> Any:
        """The number at a key. ConfigError where it is no number above 0 or, of steps, -1."""
        value = self.given.get(key, self.assumed.get(key))
        if value is None or isinstance(value, Computed):
            return default
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
        given = redact(self.given)
        lines = [write_yaml(redact(ordered)).rstrip("\n")]
        left = [f"{key} = {shown(given[key])}: {why}" for key, why in self.left.items()]
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
    found = Conversion(_flat(given), devices, _assumed(given, trainer, devices))
    for key, value in found.given.items():
        why = _take(found, key, value)
        if why is not None:
            found.left[key] = why
        else:
            found.taken.setdefault(key, "")
    if trainer:
        _defaults(found, trainer)
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
    keys = [key for key, taken in found.taken.items() if taken == ".".join(path)]
    found.notes += [] if keys else [f"left out: {line}"]
    for key in keys:
        del found.taken[key]
        found.left[key] = line


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{above}.{key}" if above else str(key)
        is_section = (
            isinstance(value, Mapping)
            and value
            and not re.search(r"columns$|(template|init|generation|scheduler)_kwargs$", path)
        )
        found |= _flat(value, path) if is_section else {path: value}
    return found


NEEDLESS: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0, 1), "top_k": (0, None, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0, 1),
    "vllm_tensor_parallel_size": (1,), "resume_from_checkpoint": (None, False), "use_peft": (False,),
    "deepspeed": (None,), "fsdp": (None, "", []), "load_in_4bit": (False,), "load_in_8bit": (False,),
    "push_to_hub": (False,), "use_liger_kernel": (False,), "lora_dropout": (0, 0.0), "torch_compile": (False,),
    "bf16": (True,), "quant_method": ("bnb",), "bnb_4bit_quant_type": ("nf4",),
}  # fmt: skip
"""Values at which a key asks for nothing that differs here."""


def _take(found: Conversion, key: str, value: Any) -> str | None:
    """Take one key over; the reason where it cannot be."""
    row = row_of(key)
    advice = advice_on(key, [name for name, _ in leaves(GRPOConfig)])
    if isinstance(value, Computed):
        return f"its value is not in this file{f'; {advice}' if advice else ''}"
    if key in RULES and value not in NEEDLESS.get(key, ()):
        return RULES[key](found, value)
    if value in NEEDLESS.get(key, ()) or (row is not None and row.path is not None and value is None):
        found.taken[key] = "needless"
    elif row is None or row.path is None:
        return advice or "mm_grpo knows no such key; `mm-grpo config` shows every field"
    else:
        found.put(row.path, value)
        found.taken[key] = row.path
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


def _steps(path: str, strategy: str = "", default: str = "steps") -> Rule:
    """A number of updates as steps; where `strategy` names another key, only while that says steps."""

    def rule(found: Conversion, value: Any) -> str | None:
        if found.given.get(strategy, default) != "steps":
            return f"counts only with {strategy}: steps"
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


def _epochs(found: Conversion, value: Any) -> str | None:
    if found.number("max_steps", -1) > 0 or value == 1:
        return None
    return "run.max_steps counts steps, not epochs: write rows x epochs / rollout.prompts_per_step (null is one pass)"


def _strategy(path: str, steps: str) -> Rule:
    def rule(found: Conversion, value: Any) -> str | None:
        if value == "no":
            found.put(path, 0)
            return None
        counted = value == "steps" and (steps in found.given or steps == "save_steps")
        return None if counted else f"{path} counts steps; write it, or leave it out"

    return rule


def _warmup(found: Conversion, value: Any) -> str | None:
    total = found.number("max_steps", -1)
    if not is_number(value) or (0 < value < 1 and total <= 0):
        return (
            f"is {shown(value)}, and the length of the run is not known; write optim.warmup_steps (updates)"
        )
    if 0 < value < 1 or "warmup_steps" not in found.values.get("optim", {}):
        found.put("optim.warmup_steps", int(value * total) if 0 < value < 1 else int(value))
    return None


def _choice(path: str, ours: Mapping[Any, Any]) -> Rule:
    """One of several values, each with ours."""

    def rule(found: Conversion, value: Any) -> str | None:
        if value not in ours:
            return f"{path} is one of {', '.join(map(str, dict.fromkeys(ours.values())))}"
        found.put(path, ours[value])
        return None

    return rule


def _with(*keys: str) -> Rule:
    """A key that the rule of another one reads."""

    def rule(found: Conversion, value: Any) -> str | None:
        used = any(found.given.get(key, found.assumed.get(key)) not in (None, False, "full") for key in keys)
        return None if used else f"counts only with {keys[0]}"

    return rule


def _dynamic(found: Conversion, value: Any) -> str | None:
    if value:
        found.put("rollout.max_attempts", int(found.number("max_resample_times", 3)) + 1)
    return None


def _trackers(found: Conversion, value: Any) -> str | None:
    named = value if isinstance(value, list) else [value]
    ours = [name for name in named if name in ("tensorboard", "wandb", "trackio")]
    found.put("run.trackers", ours)
    other = [name for name in named if name not in (*ours, "none", None)]
    said = f"run.trackers has tensorboard, wandb and trackio, not {', '.join(map(str, other))}"
    return said if other else None


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
    if same := [f"{name} -> {REWARDS[name]}" for name in named if name in REWARDS]:
        found.notes.append(f"rewards: {', '.join(same)}; see `mm-grpo rewards NAME` for what they compare")
    unknown = ", ".join(str(name) for name in named if name not in REWARDS and "." not in str(name))
    return f"no reward here is named {unknown}; write path/to/file.py:function" if unknown else None


def _dataset(found: Conversion, value: Any) -> str | None:
    if Path(str(value)).suffix:
        found.put("data.train", str(value))
        return None
    config = found.given.get("dataset_config")  # of a dataset of the hub
    hub = f"{value}:{config}" if config else str(value)
    found.put("data.train", f"{hub}:{found.given.get('dataset_train_split', 'train')}")
    if found.given.get("eval_strategy", "no") != "no" and "eval_dataset" not in found.given:
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
    elif value != "full":
        return "model.lora trains adapters; null every weight"
    return None


_DTYPES = {None: "auto", "auto": "auto", "float32": "float32", "bfloat16": "bfloat16"}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
RULES: Mapping[str, Rule] = {
    key: rule
    for keys, rule in {
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size": _batch,
        "max_steps": _steps("run.max_steps"),
        "save_steps": _steps("run.save_every", "save_strategy"),
        "eval_steps": _steps("run.eval_every", "eval_strategy", "no"),
        "save_strategy": _strategy("run.save_every", "save_steps"),
        "eval_strategy": _strategy("run.eval_every", "eval_steps"),
        "num_train_epochs": _epochs,
        "warmup_steps warmup_ratio": _warmup,
        "lr_scheduler_type": _choice("optim.lr_scheduler_type", _SCHEDULES),
        "dtype torch_dtype": _choice("model.dtype", _DTYPES),
        "report_to": _trackers,
        "use_vllm": _vllm,
        "load_in_4bit quant_bits": _choice("model.quantization", {True: "nf4", 4: "nf4"}),
        "vllm_enable_sleep_mode": _choice("rollout.vllm.sleep_level", {True: 2, False: 0}),
        "reward_funcs": _rewards,
        "dataset_name": _dataset,
        "use_peft train_type tuner_type": _lora,
        "dynamic_sample": _dynamic,
        "vllm_mode vllm_importance_sampling_correction vllm_importance_sampling_mode": _with("use_vllm"),
        "reward_weights": _with("reward_funcs"),
        "dataset_config dataset_train_split dataset_test_split": _with("dataset_name"),
        "lora_r lora_rank lora_alpha lora_target_modules target_modules": _with(
            "use_peft", "train_type", "tuner_type"
        ),
        "max_resample_times": _with("dynamic_sample"),
    }.items()
    for key in keys.split()
}


ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"lr_scheduler_type": "linear"},
    "ms-swift": {
        "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "beta": 0.04, "temperature": 0.9,
        "train_type": "lora", "per_device_train_batch_size": 1,
    },
}  # fmt: skip
"""What a trainer takes where a key is absent, and mm_grpo would not."""


def _assumed(given: Mapping[str, Any], trainer: str, devices: int) -> dict[str, Any]:
    """The keys that are absent, as the trainer takes them."""
    found = dict(ASSUMED.get(trainer, {}))
    if trainer == "ms-swift":
        if "tuner_type" in given:  # the later name
            del found["train_type"]
        if "full" in (given.get("train_type"), given.get("tuner_type")):
            found["learning_rate"] = 1e-5
        batch = Conversion(dict(given), assumed=found).number("per_device_train_batch_size", 1) * devices
        found["gradient_accumulation_steps"] = max(1, ceil(16 / batch))
    return {key: value for key, value in found.items() if key not in given}


def _defaults(found: Conversion, trainer: str) -> None:
    """Write out what the trainer does without being told, where ours would differ."""
    named = any(key in found.given for key, rule in RULES.items() if rule is _batch)
    if not named and _batch(found, None) is None:
        found.notes.append(f"rollout.prompts_per_step: of {trainer}'s default batches")
    for key, value in found.assumed.items():
        before = _flat(found.values)
        if RULES.get(key) is not _batch and _take(found, key, value) is None:
            found.taken.pop(key, None)
            new = [path for path in _flat(found.values) if path not in before]
            found.notes += [f"{path}: {trainer}'s default" for path in new]
    if "max_steps" not in found.given and "num_train_epochs" not in found.given:
        found.notes.append(f"run.max_steps: {trainer}'s default is 3 epochs; null is one pass over the data")
