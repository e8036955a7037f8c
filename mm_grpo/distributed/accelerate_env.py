"""Settings of `accelerate launch`, refused unless the config says the same.

accelerate passes its YAML file on in ACCELERATE_* variables. mm_grpo makes no `Accelerator`: a launcher only starts the
processes, and DeepSpeed is set up by `optim` (zero.py).
"""

from __future__ import annotations

import os

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError

UNSET_VALUES = ("", "auto", "none", "no", "false")


def check_launcher(config: GRPOConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError, naming each setting, if accelerate was configured with something else.

    `device` and `dtype` are those of the model on this machine. Call it before a model is loaded.
    """
    env, optim = os.environ, config.optim
    if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_PORT" in env and "WORLD_SIZE" not in env:
        raise ConfigError(  # on a CPU accelerate starts one process, unless mpirun starts the rest
            "`accelerate launch` was asked for several processes and has not numbered them (WORLD_SIZE is not set), as "
            "it does on a CPU: each would be a run of its own; use `mm-grpo train CONFIG --processes N` or torchrun"
        )
    legal = {
        "USE_FSDP": "true" if optim.zero_stage == 3 else "",
        "USE_MEGATRON_LM": "",
        "USE_CPU": "true" if device.type == "cpu" else "",
        "DYNAMO_BACKEND": "",
        "MIXED_PRECISION": "bf16" if dtype == torch.bfloat16 else "",
        "GRADIENT_ACCUMULATION_STEPS": "1",
        "DEEPSPEED_CONFIG_FILE": "",
        "DEEPSPEED_ZERO_STAGE": str(optim.zero_stage),
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "",
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu" if optim.offload_optimizer else "",
        "GRADIENT_CLIPPING": f"{optim.max_grad_norm:g}",
    }
    values = {name: env.get(f"ACCELERATE_{name}", "").lower() for name in legal}
    values["GRADIENT_CLIPPING"] = values["GRADIENT_CLIPPING"].removesuffix(".0")
    illegal = [name for name, value in values.items() if value not in (legal[name], *UNSET_VALUES)]
    if illegal:
        lines = (f"accelerate's {n.lower()} = {values[n]}: must be {legal[n] or 'left out'}" for n in illegal)
        raise ConfigError("; ".join(lines) + "; training is set up by optim.*, model.dtype and model.device")
