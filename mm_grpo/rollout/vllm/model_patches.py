"""Patches of vLLM's classes of models, here and in servers.

Names of weights in SigLIP towers: transformers since 5.19 calls their parts `vision_tower.encoder...` in memory, and on
disk if it wrote the model first; older models have `vision_tower.vision_model.encoder...`, and keep that when they are
saved. vLLM 0.32 takes only the older names, and would refuse the learner's weights. Here its classes learn the new
names too. Not needed once vLLM's own mapping has them, or its tower has no part `vision_model`.

Videos in LLaVA-OneVision: if videos of different lengths come in one step, vLLM 0.32 makes features [1, tokens, D] of
each, and stops because it expects [tokens, D]. Not needed once it makes these.

Experts of Qwen3-VL-MoE: vLLM transposes them, because published files have [E, in, out]; the learner's memory and files
that transformers 5 saves have [E, out, in]. Here only the former are. Not needed once vLLM compares the shapes.

Experts on a CPU: vLLM 0.32 packs them for its kernel at the first load alone, and reads later weights as if they were
packed. Here each load is a first one. Not needed once it packs updates too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

_NEW_NAME = r"(^|\.)vision_tower\.(?=(embeddings|encoder|post_layernorm|head)\.)"
RENAMED = {re.compile(_NEW_NAME): r"\1vision_tower.vision_model."}


def patch_model(config: Any) -> None:
    """Patch vLLM's class for the model of this transformers config."""
    if getattr(getattr(config, "vision_config", None), "model_type", None) == "siglip_vision_model":
        _teach_names(config)
    if config.model_type == "llava_onevision":
        for cls in model_classes(config):
            _flatten_videos(cls)
    if has_experts(config):
        patch_experts()


def patch_experts() -> None:
    """Patch vLLM's layers of experts. A server does it before it reads its config."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    # vLLM makes its group of experts with the first engine of a process, and only if that one has experts
    if parallel_state._EP is None:
        parallel_state._EP = parallel_state._TP
    _take_both_layouts(RoutedExperts)
    _pack_every_load(method.UnquantizedFusedMoEMethod)


def has_experts(config: Any) -> bool:
    """Return True for a mixture of experts."""
    return bool(getattr(config.get_text_config(), "num_experts", 0))


def _teach_names(config: Any) -> None:
    from vllm.model_executor.models.siglip import SiglipVisionModel
    from vllm.model_executor.models.utils import WeightsMapper

    if "vision_model" not in SiglipVisionModel.__init__.__code__.co_names:
        return
    for cls in model_classes(config):
        mapper = getattr(cls, "hf_to_vllm_mapper", None)
        if mapper is not None and not RENAMED.keys() & mapper.orig_to_new_regex.keys():
            cls.hf_to_vllm_mapper = WeightsMapper(orig_to_new_regex=RENAMED) | mapper


def _flatten_videos(cls: Any) -> None:
    process = unwrap(cls._process_video_pixels)
    cls._process_video_pixels = wraps(process)(
        lambda self, inputs: [video.flatten(0, -2) for video in process(self, inputs)]
    )


def _take_both_layouts(cls: Any) -> None:
    load = unwrap(cls.load_weights)

    @wraps(load)
    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        width = self.moe_config.hidden_dim_unpadded
        for name, tensor in weights:
            # shapes decide, because the learner refuses square experts
            in_memory = tensor.ndim == 3 and tensor.shape[2 if name.endswith("gate_up_proj") else 1] == width
            # vLLM 0.25 has no such attribute, and compares the shapes itself
            turned = in_memory and getattr(self, "is_fused_checkpoint_transposed", False)
            yield from load(self, [(name, tensor.mT if turned else tensor)])

    cls.load_weights = load_weights


def _pack_every_load(cls: Any) -> None:
    setup = unwrap(cls._setup_kernel)

    @wraps(setup)
    def first_setup(self: Any, **weights: Any) -> None:
        if not torch.cuda.is_available():
            self.moe_kernel = None
        setup(self, **weights)

    cls._setup_kernel = first_setup


def model_classes(config: Any) -> Iterator[Any]:
    """Yield vLLM's own classes for the model of this transformers config."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in config.architectures or ():
        if (registered := ModelRegistry.models.get(architecture)) is not None:
            yield registered.load_model_cls()
