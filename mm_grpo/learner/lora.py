"""LoRA through peft: small trainable factors beside frozen weights (Hu et al. 2021, arXiv:2106.09685).

peft puts its layers into the model in place, so every other part keeps the same model. The base weights are never
written: an engine or a saved model gets base + scale * B @ A, computed from the base each time, in fp32, and rounded
once to the base's dtype. So nothing drifts. But bf16 rounds away changes that are small beside a weight, early in a
run most of them: `merge_lost` measures that, and `save_adapter` writes the factors themselves. The reference policy
is the same model with its adapters switched off.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mm_grpo.config import LoRAConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.quantization import dense, dtype_of
from mm_grpo.learner.transformers_patches import copy_mode
from mm_grpo.processors.family import Family
from mm_grpo.terminal import quiet_libraries

logger = logging.getLogger("mm_grpo")
ADAPTER = "default"
MEASURED_LAYERS = 8
"""Count of layers, evenly spaced, of which a sync measures the merge."""
MERGE_LOST_WARNING = 0.1
"""Share that a merge loses from which saving warns."""


def add_adapters(model: nn.Module, config: LoRAConfig, family: Family) -> None:
    """Put adapters beside the language model's target layers and freeze everything else, in place.

    With `config.vision` every linear layer of the vision tower gets one too. The factors are fp32 whatever the base's
    dtype. ConfigError as `target_pattern`.
    """
    with quiet_libraries():
        from peft import LoraConfig, inject_adapter_in_model

    alpha: Any = config.alpha  # peft divides it by the rank, and asks for an int only in its types
    pattern = target_pattern(model, config, family)
    lora_config = LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=pattern)
    with quiet_libraries():
        inject_adapter_in_model(lora_config, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():  # peft makes them in the base's dtype
        if ".lora_" in name:
            parameter.data = parameter.data.float()


def target_pattern(model: nn.Module, config: LoRAConfig, family: Family) -> str:
    """Return the regular expression of the layers that get adapters. ConfigError if a target name fits no layer."""
    text = family.language_model(model)
    prefix = next(name for name, module in model.named_modules() if module is text)
    linear = [f".{n}" for n, m in text.named_modules() if isinstance(m, nn.Linear)]
    inside = sorted({n.rpartition(".")[2] for n in linear})
    names = inside if config.target_modules == "all-linear" else config.target_modules
    experts = "; experts are no linear layers, and get no adapters" * bool(family.routers(model))
    if experts and names == LoRAConfig().target_modules:  # they name parts of experts too
        names = [name for name in names if name in inside]
    if unknown := [name for name in names if not any(n.endswith(f".{name}") for n in linear)]:
        raise ConfigError(
            f"model.lora.target_modules: no linear layer of the language model is named {', '.join(unknown)}; they are "
            f"named {', '.join(inside)}{experts}"
        )
    pattern = rf"{re.escape(prefix)}\.(.*\.)?({'|'.join(map(re.escape, names))})"
    if config.vision:
        pattern = "|".join([pattern, *map(re.escape, _linear_layers_of_tower(model, family))])
    return pattern


def _linear_layers_of_tower(model: nn.Module, family: Family) -> list[str]:
    """Return the names of the tower's linear layers in the model. ConfigError if it has none."""
    # no subclasses: their modules read the weight itself, and would not see an adapter
    linear = {id(part) for part in family.tower(model).modules() if type(part) is nn.Linear}
    if not linear:
        raise ConfigError("model.lora.vision = true: the vision tower has no linear layer; set it to false")
    return [name for name, part in model.named_modules() if id(part) in linear]


def has_adapters(model: nn.Module) -> bool:
    """Return True when the model has adapters of `add_adapters`."""
    return any(True for _ in _layers(model))


@contextmanager
def as_frozen_base(model: nn.Module) -> Iterator[None]:
    """Switch the model's adapters off in the block, if it has any."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that have adapters."""
    return [name for name, _ in _layers(model)]


def merged_tensors(model: nn.Module, factored: Container[str] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name without adapters, tied ones under each name; merged out of place.

    Layers in `factored` keep the base's weight.
    """
    layers = dict(_layers(model))
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers:
            merged = leaf == "weight" and owner not in factored
            yield f"{owner}.{leaf}", _merged(layers[owner], tensor) if merged else dense(tensor)
        elif ".lora_" not in name:
            yield name, dense(tensor)


def frozen_base(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen parameters beside adapters, by the names of `merged_tensors`."""
    parameters = [(name.replace(".base_layer.", "."), p) for name, p in model.named_parameters()]
    return {name: p for name, p in parameters if not p.requires_grad}


def sent_factors(model: nn.Module, factored: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors of the layers `factored` as an engine runs them: in the base's dtype, the scale in lora_B."""
    for name, layer in _layers(model):
        if name in factored:
            down, up = (dense(getattr(layer, part)[ADAPTER].weight) for part in ("lora_A", "lora_B"))
            dtype = dtype_of(layer.base_layer.weight)
            yield f"base_model.model.{name}.lora_A.weight", down.to(dtype)
            yield f"base_model.model.{name}.lora_B.weight", (up * layer.scaling[ADAPTER]).to(dtype)


@contextmanager
def merged_layers(model: nn.Module, factored: Container[str] = frozenset()) -> Iterator[None]:
    """Make the model equal what engines get in the block: layers run their rounded merge, except `factored` ones."""
    layers = [layer for name, layer in _layers(model) if name not in factored]
    for layer in layers:
        layer.forward = partial(_run_merged, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _run_merged(layer: Any, inputs: Tensor) -> Tensor:
    base = layer.base_layer
    return nn.functional.linear(inputs, _merged(layer, base.weight), base.bias)


def merge_lost(model: nn.Module) -> float | None:
    """Return the share of the adapters' movement that rounding removes in a merge, measured over some layers.

    ||round(base + delta) - base - delta|| / ||delta|| with delta = scale * B @ A, in [0, 1]: a bf16 weight does
    not take a change that is smaller than 1/512 of it. None without adapters, or while delta is 0.
    """
    layers = [layer for _, layer in _layers(model)]
    lost = movement = 0.0
    with torch.no_grad():
        for layer in layers[:: max(1, -(-len(layers) // MEASURED_LAYERS))]:
            base, delta = dense(layer.base_layer.weight), _delta(layer)
            error = _merged(layer, base).float() - base.float() - delta
            lost += float(error.square().sum(dtype=torch.float64))
            movement += float(delta.square().sum(dtype=torch.float64))
    return (lost / movement) ** 0.5 if movement else None


def adapter_factors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors in fp32, by their names in peft's adapter_model.safetensors."""
    for name, layer in _layers(model):
        for part in ("lora_A", "lora_B"):
            weight = dense(getattr(layer, part)[ADAPTER].weight)
            yield f"base_model.model.{name}.{part}.weight", weight.float()


def save_adapter(model: nn.Module, path: str | Path | None, base: str) -> None:
    """Write the factors, in fp32, as peft does, with the folder or name of their `base` model beside them.

    Collective if the model is sharded; a process without a `path` writes nothing.
    """
    factors = {name: factor.cpu().contiguous() for name, factor in adapter_factors(model)}
    lost = merge_lost(model)
    if path is None:
        return
    Path(path).mkdir(parents=True, exist_ok=True)
    save_file(factors, Path(path) / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_configs: Any = model.peft_config
    adapter_config = copy.copy(peft_configs[ADAPTER])
    adapter_config.base_model_name_or_path, adapter_config.inference_mode = base, True
    adapter_config.save_pretrained(str(path))
    copy_mode(path, "adapter_config.json")
    if lost is not None and lost > MERGE_LOST_WARNING:
        logger.warning(
            "the saved model holds its weights in %s, which loses %.0f %% of what its adapters learned; the adapter "
            "that is saved beside it holds all of it: put that on the base model (peft.PeftModel.from_pretrained)",
            str(next(iter(model.parameters())).dtype).removeprefix("torch."),
            100 * lost,
        )


def _merged(layer: Any, base: Tensor) -> Tensor:
    with torch.no_grad():
        return (dense(base).float() + _delta(layer)).to(dtype_of(base))


def _delta(layer: Any) -> Tensor:
    """Return scale * B @ A in fp32 [out, in]."""
    down, up = dense(layer.lora_A[ADAPTER].weight), dense(layer.lora_B[ADAPTER].weight)
    delta: Tensor = up.float() @ down.float() * layer.scaling[ADAPTER]
    return delta


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "enable_adapters"):
            yield name, module
