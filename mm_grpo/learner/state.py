"""The learner's state on disk: fp32 weights and AdamW's running means, by parameter name.

Each process writes the parts that it holds to its own safetensors file, and reads the parts that it needs from all
files. So neither the number of processes nor their ZeRO stage matters, and none ever holds more than its share.

A file's tensors are flat: `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`. Its metadata has `starts`, the
place of each part in the flattened parameter, and `random`, the process's random numbers. Parameters
that are not trained are not stored; `frozen_digest` tells whether they are the same ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn

from mm_grpo.learner.optimizer import BaseOptimizer
from mm_grpo.learner.shards import gathered, local_part, start_of

BLOCK = 16 << 20
"""Count of bytes that are copied and hashed at once."""

FileMark = dict[str, Any]
"""What identifies a whole file: its `name`, its size in `bytes`, and `xxh3_128` of them.

XXH3 is no cryptographic hash. It finds damage, at some twenty times the speed of SHA-256."""


@dataclass(frozen=True)
class StateFile:
    """Content of a checkpoint's safetensors file: flat tensors [n], written as fp32, and texts."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def write(self, path: Path) -> FileMark:
        """Write the file; it is on the disk when this returns. Raises OSError.

        It goes block by block, without a second copy in memory.
        """
        header: dict[str, Any] = {"__metadata__": dict(self.metadata)}
        end = 0
        for key, tensor in self.tensors.items():
            begin, end = end, end + 4 * tensor.numel()
            header[key] = {"dtype": "F32", "shape": [tensor.numel()], "data_offsets": [begin, end]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        digest = xxhash.xxh3_128()
        with path.open("wb") as file:
            for block in (len(head).to_bytes(8, "little"), head):
                digest.update(block)
                file.write(block)
            for tensor in self.tensors.values():
                for part in tensor.split(BLOCK // 4):
                    data = part.float().contiguous().cpu().numpy().data
                    digest.update(data)
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        return {"name": path.name, "bytes": size, "xxh3_128": digest.hexdigest()}


def state_file(optimizer: BaseOptimizer) -> StateFile:
    """Return this process's share of the state; its tensors change with updates."""
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for fragment in optimizer.fragments():
        if fragment.repeated and not optimizer.ranks.first:
            continue
        starts[fragment.name] = fragment.start
        tensors |= {f"{kind}/{fragment.name}": tensor for kind, tensor in fragment.tensors.items()}
    return StateFile(tensors, {"starts": json.dumps(starts), "random": json.dumps(random_state())})


def load_state(
    optimizer: BaseOptimizer, files: Sequence[Path], updates: int, adam_steps: int, own: Path | None
) -> None:
    """Read this process's share from all `files`, and the random numbers from its `own` if it has one.

    Raises KeyError naming what no file holds; the caller has compared names and shapes before.
    """
    parts = {
        f"{kind}/{fragment.name}": (fragment.start, tensor)
        for fragment in optimizer.fragments()
        for kind, tensor in fragment.tensors.items()
    }
    _read(files, parts)
    optimizer.resume_at(updates, adam_steps)
    if own is not None:
        with safe_open(own, framework="pt") as file:
            set_random_state(json.loads(file.metadata()["random"]))


def load_weights(parameters: Mapping[str, Tensor], files: Sequence[Path]) -> None:
    """Read fp32 weights from all `files` into `parameters`, by name, each rounded once to its own dtype.

    Of a sharded parameter the rows of this process are read. No optimizer is needed. Raises KeyError naming what no
    file holds, ValueError for what is not finite.
    """
    parts = {f"master/{name}": (start_of(p), local_part(p).data.view(-1)) for name, p in parameters.items()}
    _read(files, parts, finite=True)


def _read(files: Sequence[Path], parts: Mapping[str, tuple[int, Tensor]], *, finite: bool = False) -> None:
    """Fill the parts [n] of tensors, by key, each with its start. Raise as `load_weights`, ValueError if `finite`."""
    filled = dict.fromkeys(parts, 0)
    for path in files:
        with safe_open(path, framework="pt") as file:
            starts = json.loads(file.metadata()["starts"])
            for key in sorted(parts.keys() & file.keys()):
                name = key.partition("/")[2]
                if finite and not file.get_tensor(key).isfinite().all():
                    raise ValueError(f"{name} holds NaN or infinite numbers")
                stored, first, (start, part) = file.get_slice(key), starts[name], parts[key]
                low, high = max(start, first), min(start + len(part), first + stored.get_shape()[0])
                if low < high:
                    part[low - start : high - start].copy_(stored[low - first : high - first])
                    filled[key] += high - low
    for key, count in filled.items():
        if count != len(parts[key][1]):
            raise KeyError(f"{key}: {count} of {len(parts[key][1])} elements are in {len(files)} files")


def mark_of(path: Path) -> FileMark:
    """Return the mark of a file on the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return {"name": path.name, "bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def frozen_digest(module: nn.Module) -> str:
    """Return a digest of the parameters that are not trained, in the order of their names; "" if all are.

    Collective if the model is sharded.
    """
    frozen = sorted((n, p) for n, p in module.named_parameters() if not p.requires_grad)
    digest = xxhash.xxh3_128()
    for name, parameter in frozen:
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        for block in gathered(parameter.detach()).reshape(-1).split(BLOCK // 4):
            digest.update(block.cpu().view(torch.uint8).numpy().data)
    return str(digest.hexdigest()) if frozen else ""


def random_state() -> dict[str, Any]:
    """Return the global random states of python, numpy and torch as JSON values."""
    version, words, gauss = random.getstate()
    kind, key, *position = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(key).tolist(), *position],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, *position = state["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *position))
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
