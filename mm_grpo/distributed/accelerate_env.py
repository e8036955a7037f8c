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
BATCH = (
    "the batch is rollout.prompts_per_step x rollout.num_generations, and optim.max_tokens_per_pack bounds the "
    'memory; write "auto", or leave it out'
)
REFUSED_IN_FILE = {
    "optimizer": "the optimizer and its rates are those of optim.*; leave it out",
    "scheduler": "the optimizer and its rates are those of optim.*; leave it out",
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
}
"""Parts of a DeepSpeed file that must be unset (or 1, for sizes), and why."""
COMPARED_IN_FILE = {
    "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print", "zero_optimization",
}  # fmt: skip
"""Parts of a DeepSpeed file that are compared with the config; what is in neither is named in a warning."""


def check_launcher(config: GRPOConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError when the launcher of this process was configured with something else than `config`.

    `device` and `dtype` are what `model.device` and `model.dtype` mean here. Call it before a model is loaded.
    """
    errors = [*_processes(), *_kind(config, device), *_precision("accelerate's mixed_precision", dtype)]
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        errors += _deepspeed(config, dtype)
    else:
        errors += _accumulation("accelerate's", os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"))
    if errors:
        raise ConfigError("\n".join(errors))


def _processes() -> Iterator[str]:
    """On a CPU accelerate starts one process, whatever it was asked for, unless mpirun starts the rest."""
    env = os.environ
    if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_PORT" in env and "WORLD_SIZE" not in env:
        yield (
            "`accelerate launch` was asked for several processes and has not numbered them (WORLD_SIZE is not set), as "
            "it does on a CPU: each would be a run of its own; use `mm-grpo train CONFIG --processes N` or torchrun"
        )


def _kind(config: GRPOConfig, device: torch.device) -> Iterator[str]:
    for kind in ("FSDP", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            yield (
                f"accelerate's distributed_type = {kind}: mm_grpo trains under DeepSpeed ZeRO, for a rollout engine in "
                "the trainer's processes needs the weights whole; set distributed_type: MULTI_GPU, or DEEPSPEED with "
                f"zero_stage: {config.optim.zero_stage}"
            )
    backend = parse_choice_from_env("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in UNSET:
        yield f"accelerate's dynamo_backend = {backend}: mm_grpo does not compile the model; leave dynamo_config out"
    if parse_flag_from_env("ACCELERATE_USE_CPU") and device.type == "cuda":
        yield f"accelerate's use_cpu = true: model.device = '{config.model.device}' is a GPU here; set model.device=cpu"


def _precision(where: str, dtype: torch.dtype, value: str | None = None) -> Iterator[str]:
    value = value or parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
    name = str(dtype).removeprefix("torch.")
    if value not in (*UNSET, "bf16"):
        yield (
            f"{where} = {value}: mm_grpo trains in float32 or bfloat16 (model.dtype, {name} here) and scales no loss; "
            "leave it out"
        )
    elif value == "bf16" and dtype != torch.bfloat16:
        yield f"{where} = bf16: the weights are {name} here; set model.dtype=bfloat16, or leave it out"


def _accumulation(where: str, value: Any) -> Iterator[str]:
    if value not in UNSET and str(value) != "1":
        yield (
            f"{where} gradient_accumulation_steps = {value}: must be 1; here accumulation follows from "
            "rollout.prompts_per_step, optim.updates_per_step and optim.max_tokens_per_pack"
        )


def _deepspeed(config: GRPOConfig, dtype: torch.dtype) -> Iterator[str]:  # noqa: C901
    """accelerate's plugin merges its own variables with the DeepSpeed file, whose values come first."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    where = "accelerate's"
    if file not in UNSET:
        where = f"DeepSpeed's config '{file if len(file) < 200 else file[:40] + '...'}':"
    try:
        plugin = DeepSpeedPlugin()
    except (
        OSError,
        ValueError,
        AttributeError,
        TypeError,
    ) as error:  # the last two of a file that is no mapping
        yield f"{where} cannot be used ({error}); deepspeed_config_file is the path of a JSON file"
        return
    optim = config.optim
    yield from _accumulation(where, plugin.gradient_accumulation_steps)
    if plugin.zero_stage == 3 or plugin.offload_param_device not in UNSET:
        name = "zero_stage" if plugin.zero_stage == 3 else "offload_param_device"
        yield f"{where} {name} = {getattr(plugin, name)}: {NO_ZERO_3}"
    elif plugin.zero_stage != optim.zero_stage:
        yield f"{where} zero_stage = {plugin.zero_stage}: optim.zero_stage is {optim.zero_stage}; set the same in both"
    clipping = plugin.gradient_clipping
    if clipping not in UNSET and clipping != optim.max_grad_norm:
        yield (
            f"{where} gradient_clipping = {clipping}: optim.max_grad_norm is {optim.max_grad_norm:g}; set the same "
            "in both"
        )
    key = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"  # its default, "none", contradicts nothing
    offload = (
        os.environ.get(key)
        if file in UNSET
        else plugin.get_value("zero_optimization.offload_optimizer.device")
    )
    if offload in ("none", "cpu") and (offload == "cpu") != optim.offload_optimizer:
        ours = str(optim.offload_optimizer).lower()
        yield (
            f"{where} offload_optimizer_device = {offload}: optim.offload_optimizer is {ours}; set the same in both"
        )
    elif offload not in (*UNSET, "cpu"):
        yield f"{where} offload_optimizer_device = {offload}: optim.offload_optimizer=true keeps it in host memory"
    if file in UNSET:
        return
    for kind in ("fp16", "bf16"):
        if plugin.get_value(f"{kind}.enabled") is True:
            yield from _precision(f"{where} mixed precision", dtype, kind)
    for part, why in REFUSED_IN_FILE.items():
        value = plugin.get_value(part)
        if value not in (*UNSET, 1):
            shown = "" if isinstance(value, dict) else f" = {value}"
            yield f"{where} {part}{shown}: {why}"
    if unused := sorted(set(plugin.deepspeed_config) - COMPARED_IN_FILE - set(REFUSED_IN_FILE)):
        logger.warning("%s %s has no effect: mm_grpo sets DeepSpeed up itself", where, ", ".join(unused))
