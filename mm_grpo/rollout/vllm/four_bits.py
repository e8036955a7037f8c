"""The learner's base in four bits in vLLM's own layers, held once for both.

vLLM is started without weights in these layers, and what a file brings for them is dropped. They run the quantised
weights of the learner in this process, with the product of bitsandbytes that its own layers call. A fused layer puts
the products of its sources side by side. The rest of the model, and the adapters, are vLLM's own.

bitsandbytes in vLLM itself (a plugin since 0.28) quantises the file again, with the tower, and takes no weights after
its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mm_grpo.errors import ConfigError

NAME = "nf4"
"""Name of this quantisation in vLLM's arguments."""


def require_all(names: Set[str], supported: Set[str], kind: str) -> None:
    """Raise ConfigError if vLLM has no layer of a `kind` for one of the learner's layers `names`."""
    if missing := names - supported:
        raise ConfigError(
            f"rollout.vllm.engine_kwargs = {{quantization: {NAME}}}: vLLM has no {kind} for {min(missing)}; leave it "
            "out, and vLLM holds its own weights in model.dtype"
        )


def register(names: Sequence[str], layers: Mapping[str, Module]) -> set[str]:
    """Register the quantisation of the engine that is started next.

    It runs the learner's `layers` of these `names`, which may be put in later. Returns a set into which the start puts
    the names that vLLM has a layer for.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    linear_method, started = _linear_method(layers), set[str]()

    @register_quantization_config(NAME)
    class NF4Config(QuantizationConfig):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.learner_names = {name: name for name in names}  # by vLLM's names

        def get_name(self) -> Any:
            return NAME

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 70

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            return cls()

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            self.learner_names = hf_to_vllm_mapper.apply_dict(self.learner_names)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None
            owner, _, leaf = prefix.rpartition(".")
            parts = [f"{owner}.{part}" for part in self.packed_modules_mapping.get(leaf, [leaf])]
            sources = [self.learner_names[part] for part in parts if part in self.learner_names]
            started.update(sources)
            return linear_method(sources) if sources else UnquantizedLinearMethod()

    return started


def _linear_method(layers: Mapping[str, Module]) -> Any:
    """Return the class of vLLM's methods for linear layers that run some of the learner's `layers`."""
    from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]
    from vllm.model_executor.layers.linear import LinearMethodBase

    class NF4Method(LinearMethodBase):
        def __init__(self, sources: Sequence[str]) -> None:
            self.sources = sources

        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            # vLLM passes the sizes by position for some layers, by name for others
            layer.width = sum(kwargs.get("output_partition_sizes") or args[1])
            weight: Any = Parameter(torch.empty(0), requires_grad=False)  # adapters ask for its device
            weight.weight_loader = lambda *args, **kwargs: None
            layer.register_parameter("weight", weight)

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            if not layers:  # vLLM measures its memory before the learner's layers are there
                return x.new_zeros(*x.shape[:-1], layer.width)
            weights: list[Any] = [layers[name].weight for name in self.sources]
            product = torch.cat([matmul_4bit(x, w, quant_state=w.quant_state) for w in weights], -1)
            return product if bias is None else product + bias

    return NF4Method
