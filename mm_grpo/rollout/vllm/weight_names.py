"""Names of weights that transformers has changed and vLLM does not know yet.

SigLIP towers: transformers since 5.19 calls their parts `vision_tower.encoder...` in memory, and on disk if it wrote
the model first; older models have `vision_tower.vision_model.encoder...`, and keep that when they are saved. vLLM 0.32
takes only the older names, and would refuse the learner's weights. Here its classes learn the new names too. Not needed
once vLLM's own mapping has them, or its tower has no part `vision_model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_NEW_NAME = r"(^|\.)vision_tower\.(?=(embeddings|encoder|post_layernorm|head)\.)"
RENAMED = {re.compile(_NEW_NAME): r"\1vision_tower.vision_model."}


def teach_names(config: Any) -> None:
    """Patch vLLM's class for the model of this transformers config to take today's names of its weights."""
    if getattr(getattr(config, "vision_config", None), "model_type", None) != "siglip_vision_model":
        return
    from vllm.model_executor.models.siglip import SiglipVisionModel
    from vllm.model_executor.models.utils import WeightsMapper

    if "vision_model" not in SiglipVisionModel.__init__.__code__.co_names:
        return
    for cls in model_classes(config):
        mapper = getattr(cls, "hf_to_vllm_mapper", None)
        if mapper is not None and not RENAMED.keys() & mapper.orig_to_new_regex.keys():
            cls.hf_to_vllm_mapper = WeightsMapper(orig_to_new_regex=RENAMED) | mapper


def model_classes(config: Any) -> Iterator[Any]:
    """Yield vLLM's own classes for the model of this transformers config."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in config.architectures or ():
        if (registered := ModelRegistry.models.get(architecture)) is not None:
            yield registered.load_model_cls()
