"""Loading the model that is trained.

The policy is a plain transformers model. Its dtype and device are settled here once: bfloat16 on a
GPU and float32 on a CPU unless the config says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForImageTextToText

from mm_grpo.config import ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.lora import add_adapters


def load_policy(config: ModelConfig) -> Any:
    """The model at `config.path`, ready to train. ConfigError when it cannot be read."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    attn = "eager" if config.attn == "eager" else "sdpa"  # the learner puts its own in sdpa's place
    try:
        model: Any = AutoModelForImageTextToText.from_pretrained(
            config.path, dtype=dtype, attn_implementation=attn
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"model.path = '{config.path}': the weights cannot be loaded ({error}); give a folder that "
            "save_pretrained wrote for a vision-language model, or a hub name that this machine can reach"
        ) from error
    model.to(device)
    if config.freeze_vision:
        model.model.visual.requires_grad_(False)
    if config.lora is not None:
        add_adapters(model, config.lora)
    return model.train()


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, else the CPU. ConfigError when the named device is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device = '{name}' cannot be used here ({str(error).splitlines()[0]}); legal are auto, cpu, cuda"
        ) from error
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
