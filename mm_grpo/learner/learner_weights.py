"""Weights of a learner as engines get them and as they are saved: adapters merged, or beside the base as factors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.learner import lora
from mm_grpo.learner.shards import is_sharded
from mm_grpo.learner.transformers_patches import save_in_parts, save_pretrained
from mm_grpo.processors.base import Processor


class LearnerWeights:
    """Base class of the learner with what leaves it: tensors for engines, a saved model, saved adapters."""

    def __init__(self, model: Any, processor: Processor, config: GRPOConfig) -> None:
        self.model, self.processor, self.config = model, processor, config
        self.adapted_layers = lora.adapted_layers(model)
        """Names of the layers with adapters."""
        self.factored: frozenset[str] = frozenset()
        """Layers of `use_factors`."""
        self.base_replaced = False
        """True if an engine may hold another base than the learner's."""

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
        if (frozen and not self.base_stays) or not self._all_factored:
            yield from lora.merged_tensors(self.model, self.factored)
        yield from lora.sent_factors(self.model, self.factored)

    def save(self, path: str | Path | None) -> None:
        """Write weights (adapters merged), config, processor and chat template: a folder that loads without us.

        Collective if the weights are sharded; a process without a `path` writes nothing.
        """
        adapted = lora.has_adapters(self.model)
        if is_sharded(self.model):
            save_in_parts(self.model, path, lora.merged_tensors(self.model))
        elif path is not None:
            merged = {"state_dict": dict(lora.merged_tensors(self.model))} if adapted else {}
            save_pretrained(self.model, path, **merged)
        if path is not None:
            self.processor.save(path)

    def save_adapter(self, path: str | Path | None) -> None:
        """Write the adapters alone, for peft, as `save` does. `model.lora` must be set."""
        lora.save_adapter(self.model, path, self.config.model.path)

    def merge_lost(self) -> float | None:
        """Return the share of the adapters' movement that merging loses (see `lora.merge_lost`)."""
        return None if self.base_stays else lora.merge_lost(self.model)

    @property
    def base_stays(self) -> bool:
        """Return True if the base is never gathered for an engine: it is sharded, and all adapters go as factors.

        The engine has read it from `model.path` by itself, and the check at the start compares scores.
        """
        return self._all_factored and is_sharded(self.model) and not self.base_replaced

    @property
    def _all_factored(self) -> bool:
        return bool(self.factored) and self.factored == set(self.adapted_layers)
