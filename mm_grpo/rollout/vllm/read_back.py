"""Reads the tensors of an update back from the layers of a vLLM model.

A digest of what was handed over says nothing of what was loaded. So, where the layout allows it, each tensor is looked
up in the model's own layers: as a view of a parameter, fused layers holding their sources one after the other, or,
where a CPU has packed a linear layer and dropped its parameter, through the layer itself, whose output for one-hot
inputs is exactly a column of its weight. What is laid out in another way keeps the digest of what came: quantised
weights, shards of a tensor-parallel group, the layouts of some kernels. Where a tensor lies is a guess by names and
shapes, which the first update, the one with all tensors, confirms by values.

Works on the model alone, in the trainer's process and in a server's worker; vLLM need not be imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mm_grpo.rollout.weights import digest, digests

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's fused layers and what they are made of, in order; a model's own `packed_modules_mapping` comes on top."""
COLUMNS = 16
"""Columns of a packed layer that are looked at after an update, others each time."""


RELOAD_LOGGERS = ("vllm.model_executor.model_loader.reload", "vllm.v1.worker")
"""Loggers above those that warn of layers without new weights."""


@dataclass(frozen=True)
class Noted:
    """A tensor as it came: dtype, shape, digest (None where a view is digested later), and for a matrix some columns
    [out, COLUMNS] with their numbers."""

    dtype: torch.dtype
    shape: torch.Size
    digest: str | None
    columns: Tensor | None
    numbers: Tensor | None


class ReadBack:
    """Notes the tensors of an update on their way into a model, and finds them again in its layers."""

    def __init__(self) -> None:
        self._views: set[str] | None = (
            None  # names whose place is confirmed, by kind; None before the first update
        )
        self._packed: set[str] = set()
        self._noted: dict[str, Noted] = {}
        self._updates = 0

    def begin(self) -> None:
        """A new update: forget what came before."""
        self._noted = {}
        self._updates += 1

    def note(self, name: str, tensor: Tensor) -> None:
        """Remember a tensor that the model is about to be given."""
        columns = numbers = None
        if tensor.ndim == 2 and (self._views is None or name in self._packed):
            width = tensor.shape[1]
            step = max(1, width // COLUMNS)
            numbers = (torch.arange(0, width, step)[:COLUMNS] + self._updates) % width
            columns = tensor[:, numbers.to(tensor.device)].clone()
        later = self._views is not None and name in self._views
        self._noted[name] = Noted(
            tensor.dtype, tensor.shape, None if later else digest(tensor), columns, numbers
        )

    def noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`tensors`, each noted as it passes."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor

    def digests(self, model: torch.nn.Module) -> dict[str, str]:
        """The digest of each noted tensor, of the model's own parameter where it can be read back.

        That of a packed layer whose columns are not those that came says so, and is no digest of anything.
        """
        own = dict(model.named_parameters(remove_duplicate=False))
        parts = {name: part.to(self._noted[name].dtype) for name, part in self.parts(model).items()}
        packed: dict[str, bool] = {}
        for name, (owner, leaf, start) in self._places(model).items():
            noted, parameter = self._noted[name], _parameter(own, owner, leaf)
            layer = getattr(model.get_submodule(owner), "cpu_linear", None) if leaf == "weight" else None
            if layer is not None and noted.columns is not None:
                packed[name] = _holds(layer, parameter, start, noted)
        views = dict(zip(parts, digests([*parts.values()]), strict=True)) if parts else {}
        if self._views is None:
            self._views = {name for name, value in views.items() if value == self._noted[name].digest}
            self._packed = {name for name, same in packed.items() if same}
        found = {name: noted.digest or views[name] for name, noted in self._noted.items()}
        found |= {name: value for name, value in views.items() if name in self._views}
        lost = [name for name, same in packed.items() if name in self._packed and not same]
        return found | {name: f"not what '{name}' was sent as" for name in lost}

    def parts(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Views of the model's parameters that hold the noted tensors, as far as their places are confirmed."""
        own = dict(model.named_parameters(remove_duplicate=False))
        found = {}
        for name, (owner, leaf, start) in self._places(model).items():
            part = _rows(_parameter(own, owner, leaf), start, self._noted[name].shape)
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


def _parameter(own: Mapping[str, Tensor], owner: str, leaf: str) -> Tensor | None:
    """A layer's parameter, which in a LoRA layer lies a level deeper."""
    return own.get(f"{owner}.{leaf}", own.get(f"{owner}.base_layer.{leaf}"))


def _rows(parameter: Tensor | None, start: int, shape: torch.Size) -> Tensor | None:
    """The rows of a parameter that a tensor of `shape` would lie in, a view; None where it cannot."""
    if parameter is None or parameter.ndim != len(shape) or parameter.shape[1:] != shape[1:]:
        return None
    part = parameter.detach()[start : start + shape[0]] if shape else parameter.detach()
    return part if part.shape == shape else None


def _holds(layer: Callable[..., Tensor], weight: Tensor | None, start: int, noted: Noted) -> bool:
    """True when a packed linear layer gives the noted columns for one-hot inputs."""
    assert noted.columns is not None and noted.numbers is not None
    inputs = torch.zeros(len(noted.numbers), noted.shape[1], dtype=noted.dtype)
    inputs[torch.arange(len(noted.numbers)), noted.numbers] = 1
    try:
        rows = layer(inputs, weight, None)[:, start : start + noted.shape[0]]
    except RuntimeError:  # of another width than the tensor
        return False
    return torch.equal(rows.t(), noted.columns)
