"""The reference policy of the KL term: the model at the start, or one of another path (`algorithm.reference_path`).

With a better model of the same type, the term teaches how that model rates the policy's own samples (on-policy
distillation).
"""

from __future__ import annotations

import copy
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.lora import has_adapters
from mm_grpo.learner.model import load_model
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.processors.model_folder import read_config

COMPARED_TOKENS = 2000
"""Count of token ids that two models are compared on."""


def reference_model(config: GRPOConfig, policy: Any, processor: Processor) -> Any:
    """Return the model of the KL's reference: None at beta 0, the policy itself if its base is frozen."""
    if config.algorithm.beta == 0:
        return None
    if config.algorithm.reference_path is not None:
        return load_reference_model(config, policy, processor)
    if has_adapters(policy):
        return policy  # it runs as its frozen base
    return copy.deepcopy(policy).requires_grad_(False).eval()


def load_reference_model(config: GRPOConfig, policy: Any, processor: Processor) -> Any:
    """Return the frozen model at `algorithm.reference_path`, on the policy's device and in its dtype.

    It gets the policy's token ids, positions and pixels: ConfigError if these mean something else to it. On torch's
    meta device no weights are loaded; only its config and processor are checked.
    """
    path, trust = str(config.algorithm.reference_path), config.model.trust_remote_code
    changes = {
        "path": path, "lora": None, "quantization": None, "freeze_vision": False, "device": str(policy.device),
        "dtype": str(policy.dtype).removeprefix("torch."),
    }  # fmt: skip
    limits: dict[str, Any] = {"min_pixels": processor.min_pixels, "max_pixels": processor.max_pixels}
    try:
        reference_processor = load_processor(
            path, processor=config.model.processor, trust_remote_code=trust, **limits
        )
        reference_config = read_config(path, trust_remote_code=trust)
        if (fault := _fault(processor, reference_processor, policy.config, reference_config)) is not None:
            raise ConfigError(
                f"algorithm.reference_path = '{path}': {fault}; the reference is given the policy's tokens and pixels, "
                "so it must be of the same type and tokenizer"
            )
        if policy.device.type == "meta":
            return None
        model = load_model(config.model.with_values(changes), processor.family)
    except ConfigError as error:  # these functions name the field of the policy
        raise ConfigError(str(error).replace("model.path", "algorithm.reference_path")) from None
    return model.requires_grad_(False).eval()


def _fault(processor: Processor, other: Processor, policy: Any, reference: Any) -> str | None:
    """Describe how two models differ in type, special tokens or COMPARED_TOKENS other tokens; None if equal."""
    if policy.model_type != reference.model_type:
        return f"it is a {reference.model_type}, and the policy a {policy.model_type}"
    for name in ("media_token_ids", "stop_token_ids"):
        ids, policy_ids = sorted(getattr(other, name)), sorted(getattr(processor, name))
        if ids != policy_ids:
            return f"its {name.replace('_', ' ')} are {ids}, and the policy's {policy_ids}"
    rows = min(c.get_text_config().vocab_size for c in (policy, reference))  # more are often added as padding
    for token in range(0, rows, max(1, rows // COMPARED_TOKENS)):
        text, policy_text = other.decode([token]), processor.decode([token])
        if text != policy_text:
            return f"its token {token} is {text!r}, and the policy's {policy_text!r}"
    return None
