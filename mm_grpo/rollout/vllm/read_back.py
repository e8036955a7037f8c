"""Digests of the tensors of an update, read back from the layers of a vLLM model.

A digest of the tensors that were sent does not prove that they were loaded. So each tensor is looked up in the model's
own layers if the layout allows it: as a view of a parameter, or, if a kernel keeps a linear layer's weight in a layout
of its own (packed on a CPU), as the layer's answer to the identity matrix. Fused layers hold their sources one after
the other. A worker of a tensor-parallel group holds a part of most tensors, which is compared with that part of what
came. What cannot be read either way keeps the digest of what came: quantised weights, packed experts, shards of sources
that a checkpoint has fused. The place of a tensor is guessed by names and shapes; the first update, which brings all
tensors, confirms it by values. All this needs only the model, and not vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mm_grpo.rollout.weights import digest, digests

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's fused layers and their sources, in order; a model's own `packed_modules_mapping` comes on top."""
EXPERTS = {".experts.gate_up_proj": "w13_weight", ".experts.down_proj": "w2_weight"}
"""Names of all experts of a layer, and vLLM's in `routed_experts`."""
RELOAD_LOGGERS = ("vllm.model_executor.model_loader.reload", "vllm.v1.worker")
"""Parents of the loggers that warn of layers without new weights."""
IDENTITY_ROWS = 1024
"""Rows of the identity matrix that a layer is given at once, to save memory."""
PADDED_TO = 64
"""Embeddings get rows up to a multiple of this in vLLM."""


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as it came: digests of the whole and of parts by shape; empty if a view is digested later."""

    dtype: torch.dtype
    shape: torch.Size
    digests: Mapping[torch.Size, str]


class ReadBack:
    """Notes the tensors of an update on their way into the model of worker `rank` of a tensor-parallel group of `size`,
    and finds them again in its layers."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        # by name the shape in the model if the place is confirmed; None before the first update
        self._views: dict[str, torch.Size] | None = None
        self._packed: Set[str] = frozenset()  # names that no parameter of the model holds as they came
        self._records: dict[str, TensorRecord] = {}

    def begin(self) -> None:
        """Forget what came before, because a new update begins."""
        self._records = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """Remember a tensor that the model is about to be given."""
        shapes = {tensor.shape}
        if self._views is None:
            shapes |= part_shapes(tensor.shape, self.size)
        elif (shape := self._views.get(name)) is not None:
            shapes = set() if shape == tensor.shape else shapes | {shape}
        parts = {shape: digest(part_of(tensor, shape, self.rank, self.size)) for shape in shapes}
        self._records[name] = TensorRecord(tensor.dtype, tensor.shape, parts)

    def note_all(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass `tensors` on, and note each."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor

    def digests(self, model: torch.nn.Module) -> dict[str, str]:
        """Return a digest of each noted tensor, of the model's own parameter if it can be read back.

        If the model holds a part, and that part is as it came, this is the digest of the whole tensor as it came.
        """
        if self._views is None:
            by_view = self._confirmed(model)
            self._packed = self._records.keys() - by_view.keys()
            self._views = by_view | self._confirmed(model)
        views = self._digests(self._places(model))
        result = {}
        for name, record in self._records.items():
            shape, view = self._views.get(name), views.get(name, "")
            as_it_came = shape is None or view == record.digests.get(shape)
            result[name] = record.digests[record.shape] if as_it_came else view
        return result

    def _confirmed(self, model: torch.nn.Module) -> dict[str, torch.Size]:
        """Return the shape in the model of each noted tensor whose place holds what came."""
        places = self._places(model)
        values = self._digests(places)
        return {
            name: shape
            for name, (part, shape) in places.items()
            if values[name] == self._records[name].digests.get(shape)
            # a part with equal numbers would fit anywhere
            and (shape == self._records[name].shape or (part.numel() and part.min() != part.max()))
        }

    def _digests(self, places: Mapping[str, tuple[Tensor, torch.Size]]) -> dict[str, str]:
        parts = {name: part.to(self._records[name].dtype) for name, (part, _) in places.items()}
        return dict(zip(parts, digests([*parts.values()]), strict=True)) if parts else {}

    def parts(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return views of the model's parameters that hold noted tensors, if their places are confirmed."""
        places = self._places(model)
        return {name: part for name, (part, _) in places.items() if name not in self._packed}

    def _places(self, model: torch.nn.Module) -> dict[str, tuple[Tensor, torch.Size]]:
        """Return the view that holds each noted tensor, and its shape with padding, as far as names and shapes tell.

        The view of a tensor in `_packed` is one of a copy.
        """
        mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        fused: Mapping[str, Any] = {**FUSED, **getattr(model, "packed_modules_mapping", {})}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        layers = dict(model.named_modules())
        copies: dict[str, Tensor | None] = {}
        places: dict[str, tuple[Tensor, torch.Size]] = {}
        for name, record in self._records.items():
            layer, siblings = name, [name]
            for target, sources in fused.items():
                source = next((s for s in sources if f".{s}." in name and s != target), None)
                if source is not None:
                    layer = name.replace(f".{source}.", f".{target}.")
                    names = [name.replace(f".{source}.", f".{s}.") for s in sources]
                    siblings = [sibling for sibling in names if sibling in self._records]
            for source, target in EXPERTS.items():
                layer = layer.replace(source, f".experts.routed_experts.{target}")
            mapped = mapper.apply_list([layer]) if mapper is not None else [layer]
            owner, _, leaf = mapped[0].rpartition(".") if mapped else ("", "", "")
            # in a LoRA layer a level deeper
            parameter: Tensor | None = parameters.get(
                f"{owner}.{leaf}", parameters.get(f"{owner}.base_layer.{leaf}")
            )
            if name in self._packed and leaf == "weight" and len(record.shape) == 2:  # no convolution
                if owner not in copies and (self._views is None or name in self._views):
                    copies[owner] = weight_by_identity(layers.get(owner))
                parameter = copies.get(owner)
            if parameter is None or parameter.ndim != len(record.shape):
                continue
            rows, number = parameter.shape[:1].numel(), siblings.index(name)
            counts = [self._records[sibling].shape[:1].numel() for sibling in siblings]
            if sum(counts) > rows:
                # there may be fewer heads of keys and values than workers: they fill the rows after the queries
                first = rows if len(counts) == 1 else counts[0] // self.size
                counts = [first, *((rows - first) * n // sum(counts[1:]) for n in counts[1:])]
            shape = torch.Size([counts[number], *parameter.shape[1:]][: parameter.ndim])
            part = parameter.detach()
            if shape:
                start, on_meta = sum(counts[:number]), torch.empty(record.shape, device="meta")
                part = part[start : start + len(part_of(on_meta, shape, self.rank, self.size))]
            if self._views is None or self._views.get(name) == shape:
                places[name] = part, shape
        return places


@contextmanager
def quiet_reload() -> Iterator[None]:
    """Hush vLLM's warnings of layers without new weights: an update brings what changed, and digests prove it."""
    loggers = [logging.getLogger(name) for name in RELOAD_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@torch.no_grad()
def weight_by_identity(layer: Any) -> Tensor | None:
    """Return a copy of the weight [out, in] of a vLLM linear layer that keeps none to read; None for another layer.

    The layer is given the identity matrix. Each output is then one product by 1 and a sum of zeros, so it is the weight
    to the bit, whatever layout the kernel keeps. If a kernel rounds (TF32, 4 bits), the first update confirms nothing.
    """
    layer = getattr(layer, "base_layer", layer)
    if not hasattr(layer, "input_size_per_partition"):
        return None
    size, dtype = layer.input_size_per_partition, layer.params_dtype
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    columns = []
    for start in range(0, size, IDENTITY_ROWS):
        rows = torch.zeros(min(IDENTITY_ROWS, size - start), size, dtype=dtype, device=device)
        rows[:, start:].fill_diagonal_(1)
        columns.append(layer.quant_method.apply(layer, rows, None).t())
    return torch.cat(columns, 1)


def part_of(tensor: Tensor, shape: torch.Size, rank: int, size: int) -> Tensor:
    """Return the part of a tensor that worker `rank` of `size` holds, a view of `shape`, or less if padding follows.

    A part goes to several neighbours if there are fewer parts than workers.
    """
    starts = []
    for full, length in zip(tensor.shape, shape, strict=True):
        copies = max(1, size * length // full) if full and size * length % full == 0 else 1
        starts.append(rank // copies * length)
    return tensor[tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))]


def part_shapes(shape: torch.Size, size: int) -> set[torch.Size]:
    """Return the shapes that a part of a tensor may have in a group of `size` workers: fewer rows, or fewer columns."""
    if size == 1 or not shape:
        return set()
    shares = [n for n in range(2, size + 1) if size % n == 0 and shape[0] % n == 0]
    rows = [*(shape[0] // n for n in shares), -(-shape[0] // PADDED_TO) * PADDED_TO // size]
    return {torch.Size([n, *shape[1:]]) for n in rows} | {torch.Size([*shape[:-1], shape[-1] // size])}
