"""What `accelerate launch` was told, held against the config: nothing that it says is silently ignored.

accelerate hands its config file on in ACCELERATE_* variables, and a script that makes an `Accelerator` obeys
them. mm_grpo makes none: it takes from a launcher the processes alone, and sets DeepSpeed up by `optim`
(zero.py). So what the launcher says about training either agrees with the config or stops the start, with
one line for each contradiction. torchrun says nothing about training.

The names are those of accelerate 1.15. To check one more, yield a line in the function that it belongs to.
"""

from __future__ import annotations

import json
import logging
import os
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.config_fields import NO_ZERO_3
from mm_grpo.errors import ConfigError
from mm_grpo.learner.policy import resolve_device, resolve_dtype

logger = logging.getLogger("mm_grpo")

UNSAID = (None, "", "auto", "none", "None")
"""Values that leave the matter to the script."""
LOOKED_AT = frozenset({
    "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler", "train_batch_size",
    "train_micro_batch_size_per_gpu", "zero_optimization",
})  # fmt: skip
"""Parts of a DeepSpeed file that are held against the config; others are named in a warning."""


def check_launcher(config: GRPOConfig, env: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError when the launcher of this process was told something else than `config` says.

    `env` stands for the environment. Call it before a model is loaded.
    """
    env = os.environ if env is None else env
    mistakes = [
        *_processes(env),
        *_kind(config, env),
        *_precision(config, env.get("ACCELERATE_MIXED_PRECISION"), "accelerate's mixed_precision"),
        *_accumulation(env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), "accelerate's"),
    ]
    if _true(env.get("ACCELERATE_USE_DEEPSPEED")):
        mistakes += _deepspeed(config, env)
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _processes(env: Mapping[str, str]) -> Iterator[str]:
    """On a CPU accelerate starts one process, whatever it was asked for, unless mpirun starts the rest."""
    if "ACCELERATE_MIXED_PRECISION" not in env or "WORLD_SIZE" in env or "MASTER_PORT" not in env:
        return
    yield (
        "`accelerate launch` was asked for several processes and has not numbered them (WORLD_SIZE is not set), as it "
        "does on a CPU: each would be a run of its own; use `mm-grpo train CONFIG --processes N` or torchrun"
    )


def _kind(config: GRPOConfig, env: Mapping[str, str]) -> Iterator[str]:
    for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM")):
        if _true(env.get(variable)):
            yield (
                f"accelerate's distributed_type = {name}: mm_grpo trains under DeepSpeed ZeRO, for a rollout engine in "
                "the trainer's processes needs the weights whole; say distributed_type: MULTI_GPU, or DEEPSPEED with "
                f"zero_stage: {config.optim.zero_stage}"
            )
    if env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() not in ("NO", ""):
        yield (
            f"accelerate's dynamo_backend = {env['ACCELERATE_DYNAMO_BACKEND']}: mm_grpo does not compile the model; "
            "leave dynamo_config out"
        )
    if (
        _true(env.get("ACCELERATE_USE_CPU"))
        and config.model.device != "cpu"
        and resolve_device(config.model.device).type == "cuda"
    ):
        yield f"accelerate's use_cpu = true: model.device = '{config.model.device}' is a GPU here; set model.device=cpu"


def _precision(config: GRPOConfig, value: str | None, where: str) -> Iterator[str]:
    if value in (*UNSAID, "no"):
        return
    dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
    name = str(dtype).removeprefix("torch.")
    if value != "bf16":
        yield (
            f"{where} = {value}: mm_grpo trains in float32 or bfloat16 (model.dtype, {name} here) and scales no loss; "
            "leave it out"
        )
    elif dtype != torch.bfloat16:
        yield f"{where} = bf16: the weights are {name} here; set model.dtype=bfloat16, or leave it out"


def _accumulation(value: Any, whose: str) -> Iterator[str]:
    if value not in UNSAID and str(value) != "1":
        yield (
            f"{whose} gradient_accumulation_steps = {value}: must be 1; here accumulation follows from "
            "rollout.prompts_per_step, optim.updates_per_step and optim.max_tokens_per_pack"
        )


def _deepspeed(config: GRPOConfig, env: Mapping[str, str]) -> Iterator[str]:
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    unsaid = "2" if file in UNSAID else None  # accelerate's own default
    yield from _stage(config, env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", unsaid), "accelerate's zero_stage")
    yield from _clipping(config, env.get("ACCELERATE_GRADIENT_CLIPPING"), "accelerate's gradient_clipping")
    for kind in ("optimizer", "param"):
        device = env.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind.upper()}_DEVICE")
        yield from _offload(config, kind, device, f"accelerate's offload_{kind}_device")
    if file is not None and file not in UNSAID:
        yield from _deepspeed_file(config, file)


def _deepspeed_file(config: GRPOConfig, file: str) -> Iterator[str]:
    where = f"DeepSpeed's config '{file if len(file) < 200 else file[:40] + '...'}':"
    try:
        said = _read(file)
    except (OSError, ValueError) as error:
        yield f"{where} cannot be read ({error}); give the path of a JSON file, as deepspeed_config_file"
        return
    zero = said.get("zero_optimization", {})
    yield from _stage(config, zero.get("stage"), f"{where} zero_optimization.stage")
    for kind in ("optimizer", "param"):
        if part := zero.get(f"offload_{kind}"):
            name = f"{where} zero_optimization.offload_{kind}.device"
            yield from _offload(config, kind, part.get("device", "cpu"), name)
    yield from _accumulation(said.get("gradient_accumulation_steps"), where)
    yield from _clipping(config, said.get("gradient_clipping"), f"{where} gradient_clipping")
    for kind in ("fp16", "bf16"):
        if said.get(kind, {}).get("enabled") is True:
            yield from _precision(config, kind, f"{where} mixed precision")
    for part in ("optimizer", "scheduler"):
        if part in said:
            yield f"{where} {part}: the optimizer and its rates are those of optim.*; leave it out"
    for part in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if said.get(part) not in (*UNSAID, 1):
            yield (
                f"{where} {part} = {said[part]}: the batch is rollout.prompts_per_step x rollout.num_generations, and "
                'optim.max_tokens_per_pack bounds the memory; say "auto", or leave it out'
            )
    if unused := sorted(set(said) - LOOKED_AT):
        logger.warning("%s %s has no effect: mm_grpo sets DeepSpeed up itself", where, ", ".join(unused))


def _read(file: str) -> dict[str, Any]:
    """A path, JSON, or JSON in base64: what accelerate reads."""
    if os.path.exists(file):
        file = Path(file).read_text(encoding="utf-8")
    try:
        said = json.loads(file)
    except json.JSONDecodeError as error:
        try:
            said = json.loads(urlsafe_b64decode(file))
        except ValueError:
            raise error from None
    if not isinstance(said, dict):
        raise ValueError("it is no mapping")
    return said


def _stage(config: GRPOConfig, value: Any, where: str) -> Iterator[str]:
    if value in UNSAID:
        return
    if str(value) == "3":
        yield f"{where} = 3: {NO_ZERO_3}"
    elif str(value) != str(config.optim.zero_stage):
        yield f"{where} = {value}: optim.zero_stage is {config.optim.zero_stage}; say the same in both"


def _clipping(config: GRPOConfig, value: Any, where: str) -> Iterator[str]:
    if value in UNSAID:
        return
    if float(value) != config.optim.max_grad_norm:
        yield f"{where} = {value}: optim.max_grad_norm is {config.optim.max_grad_norm:g}; say the same in both"


def _offload(config: GRPOConfig, kind: str, device: str | None, where: str) -> Iterator[str]:
    if device is None or device == "auto":
        return
    if kind == "param":
        if device != "none":
            yield f"{where} = {device}: {NO_ZERO_3}"
    elif device not in ("none", "cpu"):
        yield f"{where} = {device}: optim.offload_optimizer=true keeps it in the host's memory (cpu)"
    elif (device == "cpu") != config.optim.offload_optimizer:
        ours = str(config.optim.offload_optimizer).lower()
        yield f"{where} = {device}: optim.offload_optimizer is {ours}; say the same in both"


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "y", "on", "t")
