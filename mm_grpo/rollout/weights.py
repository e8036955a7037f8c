"""The tensors that a rollout engine is due, and the digests that prove what arrived.

`WeightLedger` is the one record of what an engine holds. It digests each of the learner's tensors once, sends the
engine the layers in which something changed, and compares with the digests that the engine makes of what it
received. So frozen weights go once, nothing has to be declared trainable, and after the engine lost its weights
everything goes again.

What is sent is whole units. Engines fuse neighbours into one layer (q, k, v into qkv; gate, up into
gate_up; a weight and its bias), and a layer that gets some of its sources only is finished over
uninitialised memory. Fusion never reaches past the parent module, or past all experts of a mixture, so
that is the unit. Nothing here knows a model or an engine: the tensors leave through an iterator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from mm_grpo.errors import GuardStop

if TYPE_CHECKING:
    from mm_grpo.rollout.engine import RolloutEngine

_COLUMNS = 512  # words in a row of the fold: 4 KiB
_ROWS = 8192  # rows folded at once: 32 MiB
_CPU_ROWS = 256  # 1 MiB, which the products stay in a core's cache with: eight times as fast


def unit_of(name: str) -> str:
    """Return the unit that a tensor belongs to, by its in-memory name.

    >>> unit_of("model.language_model.layers.0.self_attn.q_proj.weight")
    'model.language_model.layers.0.self_attn'
    >>> unit_of("model.language_model.layers.3.mlp.experts.7.up_proj.weight")
    'model.language_model.layers.3.mlp'
    """
    if ".experts." in name:
        return name.split(".experts.")[0]
    parts = name.rsplit(".", 2)
    return parts[0] if len(parts) == 3 else ""


def digest(tensor: Tensor) -> str:
    """Return XXH3 of 128 bits of a tensor's dtype, shape and bytes, the bytes folded on its own device first.

    Each row of 512 words of 8 bytes becomes one word: their sum modulo 2^64, weighted by odd numbers that
    differ by column. A change of any one word always shows, a change of several but for one chance in
    2^64, and a GPU sends 1/512 of the tensor to the host. No part of this is cryptographic: it finds what a transport
    lost, not what somebody forged.
    """
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """Return the `digest` of each tensor. All are on one device, which sends the folded bytes at once."""
    folds = [_fold(tensor.detach()) for tensor in tensors]
    joined = folds[0] if len(folds) == 1 else torch.cat(folds)
    parts = joined.cpu().split([len(fold) for fold in folds])
    results = []
    for tensor, part in zip(tensors, parts, strict=True):
        state = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(part.numpy().data)
        results.append(str(state.hexdigest()))
    return results


def _fold(tensor: Tensor) -> Tensor:
    """Return bytes [n] that stand for a tensor's: one word for each full row, then the bytes of the last row."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    length = flat.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    weights, rows = _weights(flat.device), _CPU_ROWS if flat.device.type == "cpu" else _ROWS
    if not length:
        return flat
    words = [
        (part * weights).sum(1) for part in flat[:length].view(torch.int64).view(-1, _COLUMNS).split(rows)
    ]
    return torch.cat([*(word.view(torch.uint8) for word in words), flat[length:]])


@dataclass
class Transfer:
    """Update on its way. Iterating it yields the tensors to send, with their names, one by one."""

    tensors: Iterator[tuple[str, Tensor, str]]
    """(name, tensor, digest) of what is to be sent, in order."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the tensors that were yielded so far, by name."""
    bytes: int = 0
    """Their size."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor, value in self.tensors:
            self.digests[name] = value
            self.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor


class WeightLedger:
    """Digests of the tensors that one engine holds.

    The first transfer must bring every tensor, tied ones under each name; its names are the inventory that later
    ones are held against.
    """

    def __init__(self) -> None:
        self._units: dict[str, set[str]] = {}
        self._held: dict[str, str] = {}

    def send(self, engine: RolloutEngine, tensors: Iterable[tuple[str, Tensor]], version: int) -> Transfer:
        """Bring the engine to the learner's `tensors`, as weights number `version`.

        Raises GuardStop, naming them, when tensors did not arrive or arrived changed. After any failure the engine
        counts as holding nothing, so the next call sends everything.
        """
        if not engine.holds_weights:
            self.forget()
        transfer = Transfer(self._due(tensors))
        try:
            received = engine.update_weights(transfer, version)
            for _ in transfer:  # tensors that the engine did not take are digested too, and so found missing
                pass
            if (message := missing_tensors(transfer.digests, received)) is not None:
                raise GuardStop(f"weight sync: {message}")
        except BaseException:
            self.forget()
            raise
        for name in transfer.digests:
            self._units.setdefault(unit_of(name), set()).add(name)
        self._held.update(transfer.digests)
        return transfer

    @property
    def empty(self) -> bool:
        """True when every tensor is due."""
        return not self._held

    def forget(self) -> None:
        """The engine lost its weights: the next transfer sends everything again."""
        self._held.clear()

    def _due(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, str]]:
        """Yield the part of the learner's `tensors` that the engine is due, in whole units.

        `tensors` may leave units out; a unit that changed must be complete. A tensor is held only until its unit is
        complete.
        """
        if not self._units:
            for _, unit_tensors in groupby(tensors, key=lambda pair: unit_of(pair[0])):
                yield from _with_digests(dict(unit_tensors))
            return
        pending: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            unit = unit_of(name)
            members = pending.setdefault(unit, {})
            members[name] = tensor
            if members.keys() < self._units[unit]:
                continue
            digested = _with_digests(pending.pop(unit))
            if any(self._held.get(member) != value for member, _, value in digested):
                yield from digested
        for unit, members in pending.items():
            if any(self._held.get(member) != value for member, _, value in _with_digests(members)):
                raise GuardStop(
                    f"weight sync: '{unit}' changed and came without {few(sorted(self._units[unit] - set(members)))}; "
                    "engines fuse such neighbours into one layer, so all of them must be sent together"
                )


def _with_digests(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, str]]:
    return list(zip(tensors, tensors.values(), digests([*tensors.values()]), strict=True))


def missing_tensors(sent: Mapping[str, str], received: Mapping[str, str]) -> str | None:
    """Compare the `sent` tensors with what arrived, by digests; return a message, or None when they are the same."""
    missing = sorted(sent.keys() - received.keys())
    extra = sorted(received.keys() - sent.keys())
    altered = sorted(name for name, value in received.items() if sent.get(name, value) != value)
    if not (missing or extra or altered):
        return None
    parts = (("never arrived", missing), ("arrived changed", altered), ("were never sent", extra))
    return (
        f"of {len(sent)} tensors "
        + "; ".join(f"{len(names)} {fault}: {few(names)}" for fault, names in parts if names)
        + ". The engine would sample from other weights than the learner's; nothing after this can be "
        "trusted. Check the engine's version and the transport of its weights"
    )


@cache
def _weights(device: torch.device) -> Tensor:
    """Return the odd column weights of the fold [512], by the SplitMix64 sequence."""
    mask, values = (1 << 64) - 1, []
    for i in range(1, _COLUMNS + 1):
        z = i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z = (z ^ z >> 31) | 1
        values.append(z - (1 << 64) if z >> 63 else z)
    return torch.tensor(values, dtype=torch.int64).to(device)


def few(names: Iterable[str]) -> str:
    """Return the first three names for a message, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(f"'{n}'" for n in listed[:3]) + more
