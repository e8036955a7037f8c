"""Frozen weights in four bits: NF4 with double quantisation (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

transformers loads such a model and bitsandbytes' layers run it: each dequantises its weight for a product and its
gradient. The linear layers of the language model are quantised; the vision tower, its projector, the embedding and
the head are not. Nor is a layer with a width that is no multiple of BLOCK (hardly any model has one), because
bitsandbytes 0.50 reads it wrongly on CPUs with AVX-512. Quantising happens in the host's memory, so that a run's base
has the same codes on every device. The scales are centred by a mean, of which the last bit depends on the number of
threads, so checkpoints identify the base by its codes. Whatever leaves the model (engines, saved models) is made of
`dense` weights.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from mm_grpo.config import ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.shards import gathered
from mm_grpo.processors.family import Family

BLOCK = 64
"""Count of weights that share a scale."""
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight: its code, one of eight bits for the largest of 64, and a float32 for 256 of these."""


def nf4_options(config: ModelConfig, model_config: Any, family: Family, dtype: torch.dtype) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for the model of a transformers config; {} if nothing is quantised.

    ConfigError if bitsandbytes cannot be imported.
    """
    if config.quantization is None:
        return {}
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"model.quantization = '{config.quantization}': bitsandbytes cannot be imported ({error}); install the "
            "extra 'qlora'"
        ) from None
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            model_config, trust_remote_code=config.trust_remote_code
        )
    chosen = {id(layer) for layer in quantised_layers(model, family)}
    # transformers by itself leaves the head alone, and quantises the tower
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    skipped = [name for name, part in linear if id(part) not in chosen]
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[f"{re.escape(name)}$" for name in skipped],
    )
    return {"quantization_config": four_bits, "device_map": {"": "cpu"}}


def quantised_layers(model: Any, family: Family) -> list[nn.Linear]:
    """Return the layers of a model that NF4 holds, without adapters."""
    linear = [
        part
        for name, part in family.language_model(model).named_modules()
        if isinstance(part, nn.Linear) and ".lora_" not in name
    ]
    return [layer for layer in linear if layer.in_features % BLOCK == 0]


def four_bit_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers in four bits, by their names without adapters."""
    modules = ((name.removesuffix(".base_layer"), part) for name, part in model.named_modules())
    return {name: part for name, part in modules if hasattr(getattr(part, "weight", None), "quant_state")}


def run_exactly(model: nn.Module) -> None:
    """Keep layers from repacking their weights for a CPU with AVX512-BF16, in place."""
    # a repacked layer that is not in training computes in bfloat16, whatever the dtype, without gradients
    parts: list[Any] = list(model.modules())
    for part in parts:
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False


def numbers_of(weight: Tensor) -> int:
    """Return the count of numbers in a parameter; a quantised one holds two in a byte."""
    state: Any = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(state.shape.numel())


def dtype_of(weight: Tensor) -> torch.dtype:
    """Return the dtype of `dense(weight)`."""
    state: Any = getattr(weight, "quant_state", None)
    dtype: torch.dtype = weight.dtype if state is None else state.dtype
    return dtype


def dense(weight: Tensor) -> Tensor:
    """Return a parameter without its graph, whole; a quantised one as a new tensor of the dtype it was loaded in."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return gathered(weight.detach())
    from bitsandbytes.functional import dequantize_4bit

    weights: Tensor = dequantize_4bit(weight.detach(), state)
    return weights
