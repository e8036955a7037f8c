"""LoRA through peft: small trainable factors beside frozen weights (Hu et al. 2021, arXiv:2106.09685).

peft puts its layers into the model in place, so every other part goes on seeing the same model. The base
weights are never written: what an engine or a saved model gets is base + scale * B @ A, computed anew from the
kept base each time, in fp32 and then rounded once. Merging into bf16 weights and taking the factors out again
would drift a little at every sync. The reference policy is the same model with its adapters switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.config import LoRAConfig
from mm_grpo.errors import ConfigError

ADAPTER = "default"


def add_adapters(model: nn.Module, config: LoRAConfig) -> None:
    """Put adapters beside the language model's target layers and freeze everything else, in place.

    The factors are fp32 whatever the base's dtype. ConfigError when a target name is that of no layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    alpha: Any = config.alpha  # peft divides it by the rank, and asks for an int only in its types

    names = "|".join(config.target_modules)
    wanted = LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=rf".*language_model.*\.({names})")
    linear = [f".{n}" for n, m in model.named_modules() if isinstance(m, nn.Linear) and "language_model" in n]
    unknown = [name for name in config.target_modules if not any(n.endswith(f".{name}") for n in linear)]
    if unknown:
        inside = sorted({n.rpartition(".")[2] for n in linear})
        raise ConfigError(
            f"model.lora.target_modules: no linear layer of the language model is named {', '.join(unknown)}; they are "
            f"named {', '.join(inside)}"
        )
    inject_adapter_in_model(wanted, model, adapter_name=ADAPTER)


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` was called on the model."""
    return any(True for _ in _layers(model))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapters, for the time of the block."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under the name it has without adapters, tied ones under each name; merged out of place."""
    layers = dict(_layers(model))
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers:
            yield f"{owner}.{leaf}", _merged(layers[owner], tensor) if leaf == "weight" else tensor.detach()
        elif ".lora_" not in name:
            yield name, tensor.detach()


def _merged(layer: Any, base: Tensor) -> Tensor:
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    with torch.no_grad():
        delta: Tensor = up.float() @ down.float() * layer.scaling[ADAPTER]
        return (base.detach().float() + delta).to(base.dtype)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "enable_adapters"):
            yield name, module
