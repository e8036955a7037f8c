"""Weights of a learner as engines get them and as they are saved: adapters merged, or beside the base as factors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.learner import lora
from mm_grpo.learner.transformers_patches import save_pretrained
from mm_grpo.processors.base import Processor


class LearnerWeights:
    """Base class of the learner with what leaves it: tensors for engines, a saved model, saved adapters."""

    def __init__(self, model: Any, processor: Processor, config: GRPOConfig) -> None:
        self.model, self.processor, self.config = model, processor, config
        self.adapted_layers = lora.adapted_layers(model)
        """Names of the layers with adapters."""
        self.factored: frozenset[str] = frozenset()
        """Layers of `use_factors`."""

    @property
    def has_frozen_base(self) -> bool:
        """Return True if the model without its adapters is the model at the start."""
        return lora.has_adapters(self.model)

    def use_factors(self, layers: Iterable[str]) -> None:
        """Send the adapters of these layers as factors from now on, because the engine runs them so."""
        self.factored = frozenset(layers)

    def weights_as_sent(self) -> AbstractContextManager[None]:
        """Make the model equal what engines get in the block: merged and rounded, but for the factors."""
        return lora.merged_layers(self.model, self.factored)

    def named_tensors(self, *, frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its in-memory name, tied ones under each name, then adapters as factors.

        Adapters of layers of `use_factors` come as factors, the others are merged. Without `frozen`, weights are left
        out if all adapters are factors, because then nothing else learns.
        """
        if frozen or not self.factored or self.factored != set(self.adapted_layers):
            yield from lora.merged_tensors(self.model, self.factored)
        yield from lora.sent_factors(self.model, self.factored)

    def save(self, path: str | Path) -> None:
        """Write weights (adapters merged), config, processor and chat template: a folder that loads without us."""
        adapted = lora.has_adapters(self.model)
        merged = {"state_dict": dict(lora.merged_tensors(self.model))} if adapted else {}
        save_pretrained(self.model, path, **merged)
        self.processor.save(path)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters alone, for peft. `model.lora` must be set."""
        lora.save_adapter(self.model, path, self.config.model.path)

    def merge_lost(self) -> float | None:
        """Return the share of the adapters' movement that merging loses (see `lora.merge_lost`)."""
        return lora.merge_lost(self.model)


def frozen_base_of(model: Any) -> AbstractContextManager[None]:
    """Run a model as its frozen base in the block; one without adapters as it is."""
    return lora.without_adapters(model)
