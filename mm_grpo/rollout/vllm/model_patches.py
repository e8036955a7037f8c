"""Patches of vLLM's classes of models, here and in servers.

Names of weights in SigLIP towers: transformers since 5.19 calls their parts `vision_tower.encoder...` in memory, and on
disk if it wrote the model first; older models have `vision_tower.vision_model.encoder...`, and keep that when they are
saved. vLLM 0.32 takes only the older names, and would refuse the learner's weights. Here its classes learn the new
names too. Not needed once vLLM's own mapping has them, or its tower has no part `vision_model`.

Videos in LLaVA-OneVision: if videos of different lengths come in one step, vLLM 0.32 makes features [1, tokens, D] of
each, and stops because it expects [tokens, D]. Not needed once it makes these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import wraps
from inspect import unwrap
from typing import Any

_NEW_NAME = r"(^|\.)vision_tower\.(?=(embeddings|encoder|post_layernorm|head)\.)"
RENAMED = {re.compile(_NEW_NAME): r"\1vision_tower.vision_model."}


def patch_model(config: Any) -> None:
    """Patch vLLM's class for the model of this transformers config."""
    if getattr(getattr(config, "vision_config", None), "model_type", None) == "siglip_vision_model":
        _teach_names(config)
    if config.model_type == "llava_onevision":
        for cls in model_classes(config):
            _flatten_videos(cls)


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


def model_classes(config: Any) -> Iterator[Any]:
    """Yield vLLM's own classes for the model of this transformers config."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in config.architectures or ():
        if (registered := ModelRegistry.models.get(architecture)) is not None:
            yield registered.load_model_cls()
