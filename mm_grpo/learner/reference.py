"""The reference policy, where it is neither the policy's start nor the policy without its adapters.

`load_reference_model` loads another model for it (`algorithm.reference_path`): with a better model of the same type,
the KL term teaches what that would have said to the policy's own samples (on-policy distillation).

`MovingReference` moves it towards the policy during a run, as in TR-DPO (arXiv:2404.09656), soft update. A bfloat16
weight loses moves of less than half its spacing, one part in 256, so there fp32 master weights take the moves, and the
model runs with these, rounded. The masters lie in the host's memory, 4 bytes for each weight in each process, for they
are needed once in `algorithm.ref_model_sync_steps` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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


class MovingReference:
    """The weights of the reference model `model`. `masters` are they in fp32, by name; fp32 weights are their own."""

    def __init__(self, model: Any) -> None:
        self.weights = {name: weight.detach() for name, weight in model.named_parameters()}
        self.masters = {
            name: weight if weight.dtype == torch.float32 else weight.float().cpu()
            for name, weight in self.weights.items()
        }

    def move(self, policy: Mapping[str, Tensor], share: float) -> None:
        """Take `share` of the policy's weights and the rest of the present ones, in place."""
        for name, weight in self.weights.items():
            present, goal = self.masters[name].to(weight.device), policy[name].detach().float()
            self._put(name, torch.lerp(present, goal, share))

    def load(self, masters: Mapping[str, Tensor]) -> None:
        """Take up fp32 weights, flat or not, as a checkpoint holds them."""
        for name, weight in self.weights.items():
            self._put(name, masters[name].view_as(weight))

    def _put(self, name: str, master: Tensor) -> None:
        self.masters[name].copy_(master)
        self.weights[name].copy_(master)
