"""Rules of `convert` for keys that need arithmetic or depend on others, and the defaults of other trainers.

A rule takes the conversion and the key's value, and returns our values by dotted path, or the reason why there are
none. To add one: a line in KEY_RULES, by the end of the key's name. Keys whose value means the same are in `keys`.

TRL's and ms-swift's `max_steps`, `save_steps` and `eval_steps` count optimizer updates, ours count steps, which make
several; their batches are per device, ours are whole. With S = steps_per_generation, A = gradient_accumulation_steps
and B = per_device_train_batch_size x S x devices: P = B / G, and a step makes S / A updates, num_iterations times. In
verl and EasyR1 steps are steps, batches count prompts, and a step makes batch / mini batch updates; their warm-up
counts steps, ours updates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from mm_grpo.config.messages import shown
from mm_grpo.config.yaml_file import set_value
from mm_grpo.errors import ConfigError
from mm_grpo.migrate.files import Unexpanded
from mm_grpo.migrate.keys import FIELD_OF, REWARDS, by_end
from mm_grpo.numbers import is_number

Converted = dict[str, Any] | str | None
"""Our values by dotted path, or a reason why there are none; None is the advice of `keys`."""
DOTTED = ("verl", "EasyR1")
"""Trainers whose keys are in sections."""
PROMPTS = "data.train_batch_size data.rollout_batch_size"
MINI_BATCH = "actor.ppo_mini_batch_size actor.global_batch_size"
BATCH = "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size "
BATCH += "global_batch_size"
_LENGTH = ("max_steps", "trainer.max_steps trainer.total_training_steps")


class UnknownValue(Exception):
    """A rule needs a value that the file does not say; the text is the reason."""


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
        """Return the value of the first key that ends in one of `ends` and has one. Raises UnknownValue."""
        keys = (key for end in ends.split() for key in self.foreign if f".{key}".endswith(f".{end}"))
        value = next((self.foreign[key] for key in keys if self.foreign[key] is not None), default)
        if isinstance(value, Unexpanded):
            raise UnknownValue(f"needs {ends.split()[0]}, which holds {value.unknown}")
        return value

    def number(self, ends: str, default: Any) -> Any:
        """Return the number at a key. Raises ConfigError unless it is above 0; steps may be -1."""
        value = self.find(ends, default)
        if not is_number(value) or not (value > 0 or value == -1):
            raise ConfigError(f"{ends.split()[0]} = {shown(value)}: must be a number above 0")
        return value

    @property
    def micro_batch(self) -> Any:
        """TRL's completions in a forward of all devices; with Megatron in an update."""
        device, group = self.number("per_device_train_batch_size", 8), self.number("num_generations", 8)
        is_r1v = self.find("open_r1") and not self.find("data_file_paths") and not self.find("use_vllm")
        device *= group if is_r1v and device < group else 1  # R1-V's batches are of prompts
        return self.number("global_batch_size", device * self.devices)

    @property
    def generation(self) -> int:
        """TRL's completions between two updates of the weights that sample."""
        accumulated = self.number("gradient_accumulation_steps", 1)
        default = self.micro_batch * self.number("steps_per_generation", accumulated)
        return int(self.number("generation_batch_size", default))

    @property
    def updates(self) -> Fraction:
        """The trainer's optimizer updates in one of our steps, of one iteration."""
        if self.trainer in DOTTED:
            return Fraction(self.number(PROMPTS, 1)) / Fraction(self.number(MINI_BATCH, 1))
        accumulated = self.number("gradient_accumulation_steps", 1)
        return Fraction(self.generation) / Fraction(self.micro_batch * accumulated)


Rule = Callable[[Conversion, Any], Converted]


def _batch(result: Conversion, value: Any) -> Converted:
    generations = result.number("num_generations", 8)
    prompts, updates = Fraction(result.generation) / Fraction(generations), result.updates
    if prompts.denominator > 1 or updates.denominator > 1:
        return (
            f"{result.generation} completions a step make {prompts} groups of {generations} and {updates} updates, "
            "which are no whole numbers; give --devices, or set rollout.prompts_per_step and optim.updates_per_step"
        )
    return {"rollout.prompts_per_step": int(prompts), "optim.updates_per_step": int(updates)}


def _mini_batch(result: Conversion, value: Any) -> Converted:
    if result.updates.denominator > 1:
        return f"is no divisor of {result.number(PROMPTS, 1)} prompts a step; set optim.updates_per_step"
    return {"optim.updates_per_step": int(result.updates)}


def _steps(result: Conversion, value: Any) -> Converted:
    path = by_end(result.key, FIELD_OF, "")
    if not is_number(value) or 0 < value < 1:
        return f"is {shown(value)}; {path} is a number of steps"
    if value <= 0 and path == "run.max_steps":
        return {}  # -1, which is the length of num_train_epochs
    steps = Fraction(value) / result.updates / Fraction(result.number("num_iterations", 1))
    if steps.denominator > 1:
        result.notes.append(f"{path}: {value} updates are {float(steps):g} steps, rounded down")
    return {path: max(1, int(steps)) if value else 0}


def _epochs(result: Conversion, value: Any) -> Converted:
    if result.number(_LENGTH[result.trainer in DOTTED], -1) > 0:
        return {}  # it ends the run there too
    rows = f"{value} x rows / {result.values.get('rollout', {}).get('prompts_per_step', 'prompts a step')}"
    return f"write run.max_steps (steps, not epochs; null is one pass over the data): {rows}"


def _warmup(result: Conversion, value: Any) -> Converted:
    if value <= 0:
        return {}
    if result.trainer not in DOTTED and result.find("lr_scheduler_type") == "constant":
        return "transformers' constant has no warm-up; write optim.warmup_steps for one"
    total = result.number(_LENGTH[result.trainer in DOTTED], -1)
    iterations = int(result.number("actor.ppo_epochs", 1))
    if value < 1 and total <= 0:
        return "the length of the run is not known; write optim.warmup_steps (updates)"
    scale = result.updates * iterations if result.trainer in DOTTED else 1
    return {"optim.warmup_steps": int((value * total if value < 1 else value) * scale)}


def _trackers(result: Conversion, value: Any) -> Converted:
    names = [name for name in _listed(value) if name not in ("none", "console", "file")]
    trackers = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    if trackers != names:
        result.omitted[result.key] = "trackers here are tensorboard, wandb and trackio"
    return {"run.trackers": trackers}


def _vllm(result: Conversion, value: Any) -> Converted:
    mode, host = result.find("vllm_mode"), result.find("vllm_server_host vllm_server_base_url")
    served = mode == "server" or (host and (mode is None or result.trainer == "ms-swift"))
    return {"rollout.engine": "vllm_server" if served else "vllm"}


def _engine(result: Conversion, value: Any) -> Converted:
    if value not in ("vllm", "hf"):
        result.omitted[result.key] = f"there is no {value} here; rollout.engine: vllm is written"
    return {"rollout.engine": "transformers" if value == "hf" else "vllm"}


def _correction(result: Conversion, value: Any) -> Converted:
    corrects = result.find("use_vllm", False) and result.find("vllm_importance_sampling_correction", True)
    return {"algorithm.importance_sampling_mode": value} if corrects else {}


def _rewards(result: Conversion, value: Any) -> Converted:
    names, weights = _listed(value), _listed(result.find("reward_weights"))
    weights = weights if len(weights) == len(names) else [None] * len(names)
    entries: list[Any] = []
    unknown: list[str] = []
    is_boxes = result.find("is_reward_customized_from_vlm_module") and result.find("task_type") == "rec"
    for name, weight in zip(map(str, names), weights, strict=True):
        module, _, function = name.rpartition(".")
        entry = "iou" if is_boxes and name == "accuracy" else REWARDS.get(name, f"{module}:{function}")
        ends = REWARD_OPTIONS.get(entry, {}).items()
        options = {ours: result.find(keys, 512 if ours == "max_length" else None) for ours, keys in ends}
        options["weight"] = None if weight is None else float(weight)
        options = {ours: option for ours, option in options.items() if option is not None}
        if module or name in REWARDS:
            entries.append({"name": entry, **options} if options else entry)
        else:
            unknown.append(name)
    if unknown:
        result.omitted[result.key] = (
            f"no reward here is named {', '.join(unknown)}; write path/to/file.py:function"
        )
    return {"rewards": entries}


REWARD_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "soft_overlong": {"max_length": "soft_max_length max_completion_length", "buffer": "soft_cache_length"},
    "repetition_penalty": {"ngram": "repetition_n_grams", "max_penalty": "repetition_max_penalty"},
}
"""Arguments of our rewards, and the keys that give them."""


def _reward_file(result: Conversion, value: Any) -> Converted:
    file, _, name = str(value).partition(":")
    default = "main" if result.trainer == "EasyR1" else "compute_score"
    name = name or result.find("custom_reward_function.name", default)
    result.notes.append(
        f"rewards: {name} has another signature in {result.trainer}; here it is (completion, answer), or other columns "
        "by name, and returns a number (docs/rewards.md)"
    )
    return {"rewards": [f"{file}:{name}"]}


def _file_paths(result: Conversion, value: Any) -> Converted:
    """Return the sources of VLM-R1's paths, which colons part, as they part the image folders."""
    paths, folders = str(value).split(":"), str(result.find("image_folders", "")).split(":")
    if len({*folders}) == 1:
        return {"data.train": paths} | ({"data.image_dir": folders[0]} if folders[0] else {})
    result.notes.append("data.train: of equal shares; in VLM-R1 all rows are one set: weight is their number")
    return {"data.train": [{"path": p, "image_dir": f} for p, f in zip(paths, folders, strict=True)]}


def _dataset(result: Conversion, value: Any) -> Converted:
    if result.find("data_file_paths"):
        return {}
    if Path(str(value)).suffix:
        is_list = str(value).endswith((".yaml", ".yml"))
        return "is a list of files; write them into data.train" if is_list else {"data.train": str(value)}
    config = result.find("dataset_config")
    hub = f"{value}:{config}" if config else str(value)
    sources = {"data.train": f"{hub}:{result.find('dataset_train_split', 'train')}"}
    if result.find("eval_strategy", "no") != "no":
        sources["data.eval"] = f"{hub}:{result.find('dataset_test_split', 'test')}"
    return sources


def _rows(result: Conversion, value: Any) -> Converted:
    lost: list[str] = []
    sources = [_source(str(text), lost) for text in _listed(value)]
    result.omitted |= {result.key: "; ".join(lost)} if lost else {}
    return {by_end(result.key, FIELD_OF, ""): sources if isinstance(value, list) else sources[0]}


def _source(text: str, lost: list[str]) -> str:
    """Return our name of ms-swift's hub::name:subset#rows, or EasyR1's name@split; what that loses goes into `lost`."""
    syntax = r"(?:(hf|ms)::)?(.+?)(?::([^:#@]+))?(?:@(\w+))?(?:#(\d+))?"
    match = re.fullmatch(syntax, text, re.DOTALL | re.IGNORECASE)
    if match is None or Path(text).expanduser().exists():
        return text
    hub, name, subset, split, rows = match.groups()
    if hub and hub.lower() == "ms":
        lost.append(f"{name} is asked of Hugging Face's hub, not of ModelScope's")
    if rows:
        lost.append(f"every row is read, not {rows}; write those rows into a file of their own")
    if Path(name).suffix in (".json", ".jsonl", ".csv", ".parquet", ".arrow") or subset == "default":
        return name
    if subset and "/" in subset:
        lost.append(f"of the subsets {subset} one is {name}:SUBSET:train; write a list of them")
    splits = ("train", "test", "validation", "val")
    parts = [name, subset, split or (None if not subset or subset in splits else "train")]
    return ":".join(part for part in parts if part)


def _column(ours: str) -> Rule:
    """Return the rule of a column's name."""
    return lambda result, value: {} if value in (ours, ours.rstrip("s")) else {f"data.columns.{ours}": value}


def _columns(result: Conversion, value: Any) -> Converted:
    names = {"query": "prompt", "image": "images", "video": "videos"}
    return {"data.columns": {names.get(ours, ours): theirs for theirs, ours in value.items()}}


def _kl(result: Conversion, value: Any) -> Converted:
    disabled = result.find("disable_kl", False)
    in_loss = result.find("use_kl_loss", False) and not disabled
    in_reward = result.find("use_kl_in_reward", result.trainer == "EasyR1" and not (in_loss or disabled))
    if in_loss and in_reward:
        return "the KL is in the loss or in the reward: write algorithm.beta, and algorithm.kl_in_reward for the latter"
    if not in_loss and not in_reward:
        return {}
    is_named = in_loss and (result.trainer == "verl" or result.find("kl_loss_coef") is not None)
    names = "kl_loss_coef kl_loss_type" if is_named else "kl_coef kl_penalty"
    coefficient, kind = names.split()
    estimator = result.find(kind, "low_var_kl" if kind == "kl_loss_type" else "kl")
    ours = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(estimator, estimator)
    values = {"algorithm.beta": result.find(coefficient, 0.001), "algorithm.kl_estimator": ours}
    return values | ({"algorithm.kl_in_reward": True} if in_reward else {})


LOSSES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("token-mean", "token"), ("algorithm.loss_type", "dapo")),
    **dict.fromkeys(("seq-mean-token-mean", "seq"), ("algorithm.loss_type", "grpo")),
    "seq-mean-token-sum": ("algorithm.loss_type", "luspo"),
    "seq-mean-token-sum-norm": ("algorithm.loss_type", "dr_grpo"),
    **dict.fromkeys(("gspo", "gspo_token"), ("algorithm.importance_sampling_level", "sequence")),
    "geo_mean": ("algorithm.loss_type", "gmpo"),
    **{name: ("algorithm.loss_type", name) for name in ("cispo", "sapo", "dppo_tv", "dppo_kl")},
}
"""Averages and kinds of the loss in verl and EasyR1: our field, and its value."""
_KIND = "policy_loss.loss_mode worker.actor.loss_type"


def _loss(result: Conversion, value: Any) -> Converted:
    path, name = LOSSES.get(value, ("", ""))
    kind = LOSSES.get(result.find(_KIND, ""), (None, None))
    if kind[0] == path and kind[1] != name:
        return f"algorithm.loss_type = {kind[1]} has an average of its own"
    return {path: name} if path else None


def _attempts(result: Conversion, value: Any) -> Converted:
    ends = "max_try_make_batch filter_groups.max_num_gen_batches max_resample_times"
    attempts = int(result.find(ends, {"EasyR1": 20, "ms-swift": 3}.get(result.trainer, 0)))
    if attempts <= 0:
        result.notes.append("rollout.max_attempts: without a limit there; 20 here")
    return {"rollout.max_attempts": attempts + (result.trainer == "ms-swift") if attempts > 0 else 20}


def _values(path: str, values: Mapping[Any, Any]) -> Rule:
    """Return the rule that puts our value in the place of theirs."""
    return lambda result, value: {path: values[value]} if value in values else None


def _lora(result: Conversion, value: Any) -> Converted:
    if value not in (True, "lora") and not is_number(value):
        return {} if value == "full" else None
    scripts = value is True  # of TRL, whose default rank is 16
    rank = value if is_number(value) else result.number("lora_r lora_rank", 16 if scripts else 8)
    alpha = result.number("lora_alpha lora.alpha", {"verl": 16, "EasyR1": 64}.get(result.trainer, 32))
    modules = result.find("lora_target_modules target_modules", None if scripts else "all-linear")
    names = [name.strip() for name in modules.split(",")] if isinstance(modules, str) else modules
    if names is None:
        result.notes.append("model.lora.target_modules: ours; without a name PEFT's depend on the model")
    targets = {} if names is None else {"target_modules": "all-linear" if names == ["all-linear"] else names}
    return {"model.lora": {"rank": rank, "alpha": alpha, **targets}}


def _stage(result: Conversion, value: Any) -> Converted:
    match = re.search(r"zero_?([0-3])(_offload)?", str(value))
    if match is None:
        return None
    if match[1] == "3":
        result.notes.append("optim.zero_stage: 3 needs rollout.engine: vllm_server, and nothing is offloaded")
    offload = {"optim.offload_optimizer": True} if match[2] and match[1] in "12" else {}
    return {"optim.zero_stage": int(match[1]), **offload}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_READ = (
    "vllm_mode vllm_importance_sampling_correction dataset_config dataset_train_split dataset_test_split"
    " lora_r lora_rank lora_alpha lora_target_modules target_modules lora.alpha nproc_per_node num_processes nnodes"
    " cuda_visible_devices soft_max_length soft_cache_length repetition_n_grams repetition_max_penalty"
    " image_folders include global_world_size task_type is_reward_customized_from_vlm_module"
    " max_resample_times max_try_make_batch filter_groups.max_num_gen_batches custom_reward_function.name"
)
"""Keys that the rule of another key reads, by the end of their names."""
KEY_RULES: Mapping[str, Rule] = {
    name: rule
    for names, rule in (
        (BATCH, _batch),
        (MINI_BATCH, _mini_batch),
        ("use_kl_loss use_kl_in_reward disable_kl kl_loss_coef kl_coef kl_penalty kl_loss_type", _kl),
        ("loss_agg_mode loss_avg_mode loss_mode actor.loss_type", _loss),
        ("clip_ratio", lambda result, value: {} if result.find("clip_ratio_low") else {"algorithm.epsilon": value}),
        # cispo's bound is 1 + clip_ratio_high there
        ("clip_ratio_high", lambda result, value: {"algorithm.epsilon_high": value + (result.find(_KIND) == "cispo")}),
        ("online_filtering filter_groups.enable dynamic_sample", _attempts),
        ("max_steps save_steps eval_steps", _steps),
        ("trainer.max_steps", lambda result, value: {"run.max_steps": value}),
        ("save_freq test_freq val_freq", lambda result, value: {by_end(result.key, FIELD_OF, ""): max(0, value)}),
        ("num_train_epochs total_epochs total_episodes max_epochs", _epochs),
        ("warmup_steps warmup_ratio lr_warmup_steps lr_warmup_ratio lr_warmup_steps_ratio", _warmup),
        ("report_to trainer.logger", _trackers),
        ("deepspeed", _stage),
        ("use_vllm", _vllm),
        ("vllm_importance_sampling_mode", _correction),
        ("rollout.name", _engine),
        ("rollout.n num_generations", lambda result, value: {"rollout.num_generations": value} if value > 1 else None),
        ("rollout_is", _values(
            "algorithm.importance_sampling_mode", {"token": "token_truncate", "sequence": "sequence_truncate"})),
        ("norm_adv_by_std_in_grpo", _values("algorithm.scale_rewards", {True: "group", False: "none"})),
        ("reward_funcs", _rewards),
        ("open_r1", lambda result, value: "R1-V's: a batch below num_generations is of prompts (without use_vllm)"),
        ("reward_weights", lambda result, value:
            {} if len(_listed(result.find("reward_funcs"))) == len(_listed(value)) else None),
        ("lr_scheduler_type", lambda result, value:
            {"optim.lr_scheduler_type": {"constant_with_warmup": "constant"}.get(value, value)}),
        ("reward_function score_function custom_reward_function.path", _reward_file),
        ("dataset_name", _dataset),
        ("data_file_paths", _file_paths),
        ("config config_name config_path", lambda result, value:
            "is not found, and its keys are missing: put them into this file, or the file of config= beside it"),
        ("dataset train_files val_dataset val_files", _rows),
        ("prompt_key dataset_prompt_column", _column("prompt")),
        ("answer_key", _column("answer")),
        ("image_key", _column("images")),
        ("video_key", _column("videos")),
        ("columns", _columns),
        ("filter_overlong_prompts", _values("data.on_overlong", {True: "drop", False: "stop"})),
        ("truncation_strategy", _values("data.on_overlong", {"delete": "drop"})),
        ("enable_thinking", lambda result, value: {"data.chat_template_kwargs.enable_thinking": value}),
        ("betas", lambda result, value: {"optim.adam_beta1": value[0], "optim.adam_beta2": value[1]}),
        ("use_peft train_type tuner_type model.lora_rank lora.rank", _lora),
        ("system", lambda result, value: None if str(value).endswith(".txt") else {"data.system_prompt": str(value)}),
        (_READ, lambda result, value: {}),
    )
    for name in names.split()
}  # fmt: skip
"""Rules by the end of a key's name."""

NEEDLESS: Mapping[str, tuple[object, ...]] = {
    name: values
    for names, values in (
        ("top_p repetition_penalty vllm_tensor_parallel_size num_train_epochs total_epochs", (1,)),
        ("do_sample use_hf bf16 do_train val_before_train", (True,)),
        ("min_p lora_dropout limit_images split_dataset_ratio lora.rank model.lora_rank", (0,)),
        ("resume_from_checkpoint use_peft load_in_4bit push_to_hub val_only use_vllm", (False,)),
        ("dynamic_sample online_filtering filter_groups.enable", (False,)),
        ("save_strategy eval_strategy", ("steps",)), ("top_k", (0, -1)), ("report_to", ("none",)),
        ("rlhf_type", ("grpo",)), ("truncation", ("error",)), ("loss_mode actor.loss_type", ("vanilla", "default")),
        ("config_name", ("ppo_trainer", "ppo_megatron_trainer")), ("config_path", ("config",)),
        ("val_dataset", ([],)), ("model_revision", ("main",)), ("exclude_modules", (".*visual.*",)),
    )
    for name in names.split()
}  # fmt: skip
"""Values of keys, by the end of their names, that ask for what mm_grpo does anyway. Null asks for nothing."""
EPOCHS = {"TRL": 3, "ms-swift": 3, "verl": 30, "EasyR1": 15}
_ACTOR = "actor_rollout_ref.actor."
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"lr_scheduler_type": "linear", "vllm_importance_sampling_mode": "sequence_mask", BATCH.split()[0]: 8},
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


def foreign_defaults(foreign: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """Return a trainer's values for absent keys that differ from ours."""
    defaults = dict(DEFAULTS[trainer])
    if trainer == "ms-swift" and "full" in (foreign.get("train_type"), foreign.get("tuner_type")):
        defaults["learning_rate"] = 1e-5
    kind = foreign.get(f"{_ACTOR}policy_loss.loss_mode", foreign.get("worker.actor.loss_type", "default"))
    unused = {"tuner_type"} if "train_type" in foreign else set()
    unused |= {"per_device_train_batch_size"} if "global_batch_size" in foreign else set()
    if "open_r1" in foreign:  # R1-V and VLM-R1 ask for a TRL of that default
        defaults["beta"] = 0.04
    if kind not in ("vanilla", "default"):  # no other loss has the second bound
        unused = {f"{_ACTOR}clip_ratio_c", "worker.actor.clip_ratio_dual"}
    return {key: value for key, value in defaults.items() if key not in foreign and key not in unused}
