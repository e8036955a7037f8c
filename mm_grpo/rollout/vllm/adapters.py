"""The learner's adapters in vLLM's own LoRA layers: put in from memory, and read back from the layers' buffers.

vLLM computes base(x) + B A x with the factors, so it follows small changes that a merge into bfloat16 weights would
lose. There is one adapter, and every request names it (`request`). B is sent with the scale in it, so the buffers hold
the numbers that were sent, to the bit. The functions need only the model, to which vLLM attaches its LoRA manager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mm_grpo.rollout.vllm.model_patches import model_classes
from mm_grpo.rollout.weights import digest

NAME, NUMBER = "policy", 1
"""vLLM's name and number of the adapter; 0 stands for none."""
PREFIX = "base_model.model."
"""Prefix of the names of factors, as in peft's files."""
BESIDE_EXPERTS = (
    "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "shared_expert_gate", "in_proj_qkvz", "in_proj_ba", "out_proj",
)  # fmt: skip
"""vLLM's names of layers of the text model, without experts."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes buffers."""


def is_factor(name: str) -> bool:
    """Return True for the name of a factor, False for the name of a weight."""
    return name.startswith(PREFIX)


def request() -> Any:
    """Make the part of a vLLM request that names the adapter. vLLM never reads the path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, "memory")


def supports(config: Any, *, tower: bool = False) -> bool:
    """Return True if vLLM takes adapters of this transformers config's language model, or also of the `tower`."""
    flags = ("supports_lora", "supports_tower_connector_lora")[: 1 + tower]
    return any(all(getattr(cls, flag, False) for flag in flags) for cls in model_classes(config))


def supported_layers(model: Any, layers: Iterable[str]) -> frozenset[str]:
    """Return the learner's linear `layers` for which vLLM's model has LoRA layers."""
    return frozenset(layer for layer in layers if _lora_layer(model, layer) is not None)


def put(model: Any, factors: Mapping[str, Tensor]) -> None:
    """Make `factors` the adapter: for each layer lora_A [rank, in] and lora_B [out, rank] with the scale in it."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = model.lora_manager
    rank = next(iter(factors.values())).shape[0]
    names = sorted({name.split(".")[-3] for name in factors})
    helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": names})
    lora = LoRAModel.from_lora_tensors(
        NUMBER,
        # the manager keeps its tensors, and the learner's next update would change them
        {name: factor.clone() for name, factor in factors.items()},
        helper,
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper(model),
    )
    manager.remove_adapter(NUMBER)
    manager.add_adapter(lora)
    manager.activate_adapter(NUMBER)
    manager._last_mapping = None  # its indices lie in memory that sleep level 2 gives back


def read_back(model: Any, factors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each factor by name: of the factor as it came if the layer's buffer holds it, else of the
    buffer. In a tensor-parallel group a layer holds a part, which is compared with that part. A factor that vLLM has
    cut over several buffers cannot be compared, and counts as it came."""
    index = model.lora_manager.lora_index_to_id.index(NUMBER)
    result: dict[str, str] = {}
    for name, factor in factors.items():
        layer, part = name.removeprefix(PREFIX).rsplit(".", 2)[:2]
        lora_layer = _lora_layer(model, layer)
        assert lora_layer is not None
        module, number = lora_layer
        stacked = module.lora_a_stacked if part == "lora_A" else module.lora_b_stacked
        expected = _local_part(module, number, part, factor)
        rows, columns = expected.shape
        buffer = stacked[number][index, 0, :rows, :columns].to(factor.dtype)
        differs = buffer.shape == expected.shape and not torch.equal(buffer, expected)
        result[name] = digest(buffer.contiguous() if differs else factor)
    return result


def _local_part(module: Any, number: int, part: str, factor: Tensor) -> Tensor:
    """Return the part of a factor that this worker's LoRA layer holds, by vLLM's own rule."""
    if module.tp_size == 1:
        return factor
    cut = module.slice_lora_a if part == "lora_A" else module.slice_lora_b
    if module.n_slices == 1:
        return cast(Tensor, cut(factor))
    sources: list[Tensor | None] = [None] * module.n_slices
    sources[number] = factor
    return cast(Tensor, cut(sources)[number])


def _lora_layer(model: Any, layer: str) -> tuple[Any, int] | None:
    """Return vLLM's LoRA layer for a layer of the learner, and the index inside a fused layer; None without one."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = model.lora_manager
    name, _ = parse_fine_tuned_lora_name(f"{PREFIX}{layer}.lora_A.weight", _mapper(model))
    if name in manager.modules:
        return manager.modules[name], 0
    for fused, sources in manager.packed_modules.items():
        if name in sources:
            return manager.modules[fused], sources.index(name)
    return None


def _mapper(model: Any) -> Any:
    """Return the model's renaming of weights; newer versions keep it apart from their fusions."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
