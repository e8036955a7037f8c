"""Reads the tensors of an update back from the layers of a vLLM model.

A digest of what was handed over says nothing of what was loaded. So, where the layout allows it, each tensor is looked
up in the model's own layers: as a view of a parameter, fused layers holding their sources one after the other. What is
laid out in another way keeps the digest of what came: quantised weights, shards of a tensor-parallel group, the layouts
of some kernels, linear layers that a CPU has packed. Where a tensor lies is a guess by names and shapes, which the
first update, the one with all tensors, confirms by values.

Works on the model alone, in the trainer's process and in a server's worker; vLLM need not be imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mm_grpo.rollout.weights import digest, digests

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's fused layers and what they are made of, in order; a model's own `packed_modules_mapping` comes on top."""
RELOAD_LOGGERS = ("vllm.model_executor.model_loader.reload", "vllm.v1.worker")
"""Loggers above those that warn of layers without new weights."""


@dataclass(frozen=True)
class Noted:
    """A tensor as it came; the digest is None where a view is digested later."""

    dtype: torch.dtype
    shape: torch.Size
    digest: str | None


class ReadBack:
    """Notes the tensors of an update on their way into a model, and finds them again in its layers."""

    def __init__(self) -> None:
        # names whose place is confirmed; None before the first update
        self._views: set[str] | None = None
        self._noted: dict[str, Noted] = {}

    def begin(self) -> None:
        """A new update: forget what came before."""
        self._noted = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """Remember a tensor that the model is about to be given."""
        later = self._views is not None and name in self._views
        self._noted[name] = Noted(tensor.dtype, tensor.shape, None if later else digest(tensor))

    def noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`tensors`, each noted as it passes."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor

    def digests(self, model: torch.nn.Module) -> dict[str, str]:
        """The digest of each noted tensor, of the model's own parameter where it can be read back."""
        parts = {name: part.to(self._noted[name].dtype) for name, part in self.parts(model).items()}
        views = dict(zip(parts, digests([*parts.values()]), strict=True)) if parts else {}
        if self._views is None:
            self._views = {name for name, value in views.items() if value == self._noted[name].digest}
        found = {name: noted.digest or views[name] for name, noted in self._noted.items()}
        return found | {name: value for name, value in views.items() if name in self._views}

    def parts(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Views of the model's parameters that hold the noted tensors, as far as their places are confirmed."""
        own = dict(model.named_parameters(remove_duplicate=False))
        found = {}
        for name, (owner, leaf, start) in self._places(model).items():
            # in a LoRA layer a level deeper
            parameter = own.get(f"{owner}.{leaf}", own.get(f"{owner}.base_layer.{leaf}"))
            part = _rows(parameter, start, self._noted[name].shape)
            if part is not None and (self._views is None or name in self._views):
                found[name] = part
        return found

    def _places(self, model: torch.nn.Module) -> dict[str, tuple[str, str, int]]:
        """Layer, parameter and first row of each noted tensor, as far as names and shapes tell."""
        mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        fused: Mapping[str, Any] = {**FUSED, **getattr(model, "packed_modules_mapping", {})}
        layers = {name for name, _ in model.named_modules()}
        found: dict[str, tuple[str, str, int]] = {}
        for name in self._noted:
            layer, start = name, 0
            for target, sources in fused.items():
                source = next((s for s in sources if f".{s}." in name and s != target), None)
                if source is None:
                    continue
                layer = name.replace(f".{source}.", f".{target}.")
                before = [
                    name.replace(f".{source}.", f".{s}.") for s in sources[: list(sources).index(source)]
                ]
                if any(sibling not in self._noted for sibling in before):
                    break
                start = sum(self._noted[sibling].shape[0] for sibling in before)
            mapped = mapper.apply_list([layer]) if mapper is not None else [layer]
            owner, _, leaf = mapped[0].rpartition(".") if mapped else ("", "", "")
            if owner in layers:
                found[name] = owner, leaf, start
        return found


@contextmanager
def quiet_reload() -> Iterator[None]:
    """No warning for each layer that got nothing: an update brings what changed, and digests say what arrived."""
    loggers = [logging.getLogger(name) for name in RELOAD_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _rows(parameter: Tensor | None, start: int, shape: torch.Size) -> Tensor | None:
    """The rows of a parameter that a tensor of `shape` would lie in, a view; None where it cannot."""
    if parameter is None or parameter.ndim != len(shape) or parameter.shape[1:] != shape[1:]:
        return None
    part = parameter.detach()[start : start + shape[0]] if shape else parameter.detach()
    return part if part.shape == shape else None
