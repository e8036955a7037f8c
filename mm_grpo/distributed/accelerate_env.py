"""Settings of `accelerate launch`, compared with the config: nothing in its file is silently ignored.

accelerate hands its YAML file on in ACCELERATE_* variables, and a script that makes an `Accelerator` obeys them.
mm_grpo makes none: it takes from a launcher the processes alone, and sets DeepSpeed up by `optim` (zero.py). So what
accelerate reads from those variables, with its own parsers, either agrees with the config or stops the start, with
one line for each contradiction. torchrun configures nothing but processes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin, parse_choice_from_env, parse_flag_from_env

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.migrate.keys import NO_ZERO_3

logger = logging.getLogger("mm_grpo")

UNSET = (None, "", "auto", "none", "no")
"""Values that leave the matter to the script."""
ACCUMULATION = (
    "must be 1; here accumulation follows from rollout.prompts_per_step, optim.updates_per_step and "
    "optim.max_tokens_per_pack"
)
OPTIMIZER = "the optimizer and its rates are those of optim.*; leave it out"
BATCH = 'the batch is rollout.prompts_per_step x rollout.num_generations; write "auto", or leave it out'
REFUSED_IN_FILE = {
    "optimizer": OPTIMIZER, "scheduler": OPTIMIZER, "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH,
}  # fmt: skip
"""Parts of a DeepSpeed file that must be unset (or 1, for sizes), and why."""
COMPARED_IN_FILE = {
    "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print", "zero_optimization",
}  # fmt: skip
"""Parts of a DeepSpeed file that are compared with the config; what is in neither is named in a warning."""
Setting = tuple[str, Any, tuple[Any, ...], str]
"""A launcher's setting: name, value, the legal values beside UNSET, and why no other is."""


def check_launcher(config: GRPOConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError when the launcher of this process was configured with something else than `config`.

    `device` and `dtype` are what `model.device` and `model.dtype` mean here. Call it before a model is loaded.
    """
    env, where = os.environ, "accelerate's"
    if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_PORT" in env and "WORLD_SIZE" not in env:
        raise ConfigError(  # on a CPU accelerate starts one process, unless mpirun starts the rest
            "`accelerate launch` was asked for several processes and has not numbered them (WORLD_SIZE is not set), as "
            "it does on a CPU: each would be a run of its own; use `mm-grpo train CONFIG --processes N` or torchrun"
        )
    settings = list(_plain(config, device, dtype))
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if file not in UNSET:
            where = f"DeepSpeed's config '{file if len(file) < 200 else file[:40] + '...'}':"
        try:
            plugin = DeepSpeedPlugin()  # merges its own variables with the file, whose values come first
        except Exception as error:  # it raises many kinds over a file that is none, or no mapping
            raise ConfigError(f"{where} cannot be used ({error}); it is the path of a JSON file") from None
        settings += [*_deepspeed(config, plugin), *(_file(plugin, dtype) if file not in UNSET else ())]
        unused = (
            set() if file in UNSET else set(plugin.deepspeed_config) - COMPARED_IN_FILE - set(REFUSED_IN_FILE)
        )
        if unused:
            logger.warning("%s %s has no effect: mm_grpo sets DeepSpeed up", where, ", ".join(sorted(unused)))
    else:
        steps = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
        settings.append(("gradient_accumulation_steps", steps, ("1",), ACCUMULATION))
    lines = [
        f"{where} {name} = {value}: {why}"
        for name, value, legal, why in settings
        if value not in (*UNSET, *legal)
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _plain(config: GRPOConfig, device: torch.device, dtype: torch.dtype) -> Iterator[Setting]:
    for kind in ("FSDP", "MEGATRON_LM"):
        why = (
            "a rollout engine in the trainer's processes needs the weights whole; set distributed_type: MULTI_GPU, or "
            f"DEEPSPEED with zero_stage: {config.optim.zero_stage}"
        )
        yield "distributed_type", kind if parse_flag_from_env(f"ACCELERATE_USE_{kind}") else None, (), why
    backend = parse_choice_from_env("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    yield "dynamo_backend", backend, (), "mm_grpo does not compile the model; leave dynamo_config out"
    cpu = "true" if parse_flag_from_env("ACCELERATE_USE_CPU") and device.type == "cuda" else None
    yield "use_cpu", cpu, (), f"model.device = '{config.model.device}' is a GPU here; set model.device=cpu"
    yield _precision(parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no"), dtype)


def _precision(value: str | None, dtype: torch.dtype) -> Setting:
    name = str(dtype).removeprefix("torch.")
    legal = ("bf16",) if dtype == torch.bfloat16 else ()
    return "mixed_precision", value, legal, f"model.dtype is {name} here, and no loss is scaled; leave it out"


def _deepspeed(config: GRPOConfig, plugin: DeepSpeedPlugin) -> Iterator[Setting]:
    optim, same = config.optim, "set the same in both"
    yield "gradient_accumulation_steps", plugin.gradient_accumulation_steps, (1, "1"), ACCUMULATION
    why = NO_ZERO_3 if plugin.zero_stage == 3 else f"optim.zero_stage is {optim.zero_stage}; {same}"
    yield "zero_stage", plugin.zero_stage, (optim.zero_stage,), why
    yield "offload_param_device", plugin.offload_param_device, (), NO_ZERO_3
    why = f"optim.max_grad_norm is {optim.max_grad_norm:g}; {same}"
    yield "gradient_clipping", plugin.gradient_clipping, (optim.max_grad_norm,), why
    legal = ("cpu",) if optim.offload_optimizer else ()
    why = "optim.offload_optimizer=true keeps the optimizer's state in host memory"
    yield "offload_optimizer_device", plugin.offload_optimizer_device, legal, why


def _file(plugin: DeepSpeedPlugin, dtype: torch.dtype) -> Iterator[Setting]:
    for kind in ("fp16", "bf16"):
        yield _precision(kind if plugin.get_value(f"{kind}.enabled") is True else None, dtype)
    for part, why in REFUSED_IN_FILE.items():
        value = plugin.get_value(part)
        yield part, "{...}" if isinstance(value, dict) else value, (1,), why
