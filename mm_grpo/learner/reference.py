"""The reference policy of another path (`algorithm.reference_path`): with a better model of the same type, the KL term
teaches what that would have said to the policy's own samples (on-policy distillation).
"""

from __future__ import annotations

from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.model import load_model
from mm_grpo.processors.base import Processor, load_processor

SAMPLES = 2000
"""Token ids that two models are compared on."""


def load_reference_model(config: GRPOConfig, policy: Any, processor: Processor) -> Any:
    """The frozen model at `algorithm.reference_path`, on the policy's device and in its number format.

    It is given the policy's token ids, positions and pixels: ConfigError where these mean something else to it.
    """
    path = str(config.algorithm.reference_path)
    changes = {
        "path": path, "lora": None, "quantization": None, "freeze_vision": False, "device": str(policy.device),
        "dtype": str(policy.dtype).removeprefix("torch."),
    }  # fmt: skip
    try:
        section = config.model.with_values(changes)
        limits: dict[str, Any] = {"min_pixels": processor.min_pixels, "max_pixels": processor.max_pixels}
        theirs = load_processor(
            path, named=section.processor, trust_remote_code=section.trust_remote_code, **limits
        )
        model = load_model(section, processor.family)
    except ConfigError as error:  # of functions that know one model
        raise ConfigError(str(error).replace("model.path", "algorithm.reference_path")) from None
    kinds = [m.config.model_type for m in (policy, model)]
    fault = None if kinds[0] == kinds[1] else f"it is a {kinds[1]}, and the policy a {kinds[0]}"
    fault = fault or _token_fault(processor, theirs, policy, model)
    if fault is not None:
        raise ConfigError(
            f"algorithm.reference_path = '{path}': {fault}; the reference is given the policy's tokens and pixels, so "
            "it must be of the same type and tokenizer"
        )
    return model.requires_grad_(False).eval()


def _token_fault(ours: Processor, theirs: Processor, policy: Any, model: Any) -> str | None:
    """Describe how two models' tokens differ, by special tokens and up to SAMPLES others; None if they do not."""
    for what in ("media_token_ids", "stop_token_ids"):
        ids, own = sorted(getattr(theirs, what)), sorted(getattr(ours, what))
        if ids != own:
            return f"its {what.replace('_', ' ')} are {ids}, and the policy's {own}"
    rows = [len(m.get_output_embeddings().weight) for m in (policy, model)]  # more are often added as padding
    for token in range(0, min(rows), max(1, min(rows) // SAMPLES)):
        mine, other = ours.decode([token]), theirs.decode([token])
        if mine != other:
            return f"its token {token} is {other!r}, and the policy's {mine!r}"
    return None
