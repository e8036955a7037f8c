"""Weights on their way, in chunks of a bounded size: what both ends of a transfer know of them.

A chunk is one buffer of bytes, its tensors one after the other, each at an address that any dtype allows. `Meta` is
what the other end is told of a tensor, in JSON. One broadcast a chunk, and never more than a chunk in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 512 << 20
ALIGNED = 16


@dataclass(frozen=True)
class Meta:
    """A tensor of a chunk: its name, dtype (`bfloat16`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Meta:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Meta:
        return cls(value["name"], value["dtype"], tuple(value["shape"]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"'{self.name}' has dtype '{self.dtype}', which torch does not have")
        return found

    @property
    def bytes(self) -> int:
        size = self.torch_dtype.itemsize
        for length in self.shape:
            size *= length
        return size


def chunks(
    tensors: Iterable[tuple[str, Tensor]], limit: int = CHUNK_BYTES
) -> Iterator[list[tuple[str, Tensor]]]:
    """`tensors` in order, in lists of at most `limit` bytes each; a larger tensor is a list of its own.

    A tensor is detached, and not copied.
    """
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        one = tensor.numel() * tensor.element_size()
        if held and size + one > limit:
            yield held
            held, size = [], 0
        held.append((name, tensor.detach()))
        size += one
    if held:
        yield held


def offsets(metas: Sequence[Meta]) -> tuple[list[int], int]:
    """The place of each tensor in its chunk's buffer, and the size of the whole, in bytes."""
    places, end = [], 0
    for meta in metas:
        places.append(end)
        end += -(-meta.bytes // ALIGNED) * ALIGNED
    return places, end


def pack(chunk: Sequence[tuple[str, Tensor]], device: torch.device | str) -> Tensor:
    """The buffer of a chunk, uint8 [bytes], on `device`; the gaps between tensors are 0."""
    metas = [Meta.of(name, tensor) for name, tensor in chunk]
    places, size = offsets(metas)
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    for place, meta, (_, tensor) in zip(places, metas, chunk, strict=True):
        if meta.bytes:
            view = buffer[place : place + meta.bytes].view(meta.torch_dtype).view(meta.shape)
            view.copy_(tensor)
    return buffer


def unpack(buffer: Tensor, metas: Sequence[Meta]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a buffer, as views of it."""
    places, size = offsets(metas)
    if buffer.numel() != size:
        raise ValueError(f"a chunk of {size} bytes was announced, and {buffer.numel()} came")
    for place, meta in zip(places, metas, strict=True):
        part = buffer[place : place + meta.bytes]
        yield meta.name, part.view(meta.torch_dtype).view(meta.shape)
