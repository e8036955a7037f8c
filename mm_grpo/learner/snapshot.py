"""Copies of tensors as they are now, in the host's memory, for a thread that writes them while training goes on.

The memory is taken once: taking it anew costs more than copying. For tensors on a GPU it is page-locked, which makes
the copy several times faster, by `cudaHostRegister`: torch's `pin_memory` rounds a size up to a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor


class Snapshot:
    """One buffer of fp32 for copies of the same tensors, made again and again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)
        self._locked = False

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Flat fp32 copies [n] of flat tensors [n], complete on return. They hold until the next call."""
        sizes = [tensor.numel() for tensor in tensors.values()]
        gpu = any(tensor.is_cuda for tensor in tensors.values())
        if len(self._buffer) != sum(sizes):
            self._allocate(sum(sizes), lock=gpu)
        copies = dict(zip(tensors, self._buffer.split(sizes), strict=True))
        with torch.no_grad():
            for name, tensor in tensors.items():
                copies[name].copy_(tensor, non_blocking=True)
        if gpu:
            torch.cuda.synchronize()
        return copies

    def clear(self) -> None:
        """Free the memory."""
        self._allocate(0)

    def _allocate(self, count: int, *, lock: bool = False) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._buffer = torch.empty(count, dtype=torch.float32)
        self._locked = lock and _lock(self._buffer)


def _lock(buffer: Tensor) -> bool:
    """Lock the pages of a buffer; False where the system allows no so large a lock, and copies are only slower."""
    size = buffer.element_size() * buffer.numel()
    if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
        return True
    with suppress(RuntimeError):  # else the next kernel, whosever it is, would raise what was refused here
        torch.zeros(1, device="cuda")
    return False
