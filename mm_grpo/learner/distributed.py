"""Which of how many processes this is, and the few things that processes tell each other.

`start` reads what torchrun and `accelerate launch` set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT) and opens the process group through DeepSpeed: gloo on the CPU, NCCL on GPUs. One process
opens none. `Ranks` is then handed to whoever has something to agree on; with one process each of its
methods is the identity. What it exchanges is small and goes over gloo on the CPU, so every wait has a
deadline that is kept. Gradients are not exchanged here but by `zero.py` and `optimizer.py`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mm_grpo.errors import ConfigError, GuardStop, UserError

DEADLINE = 1800.0
"""Seconds that a process waits for the others; a rollout may take one of them so much longer."""
BUCKET = 64 << 20
"""Elements that are summed over the processes at once."""

T = TypeVar("T")


class RankLost(RuntimeError):
    """Another process failed, ended, or kept this one waiting past the deadline."""


@dataclass(frozen=True)
class Ranks:
    """This process's number among `world` processes. `group` carries objects and numbers (gloo)."""

    rank: int = 0
    world: int = 1
    group: Any = None
    deadline: float = DEADLINE

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This process's share: every `world`-th item, starting at its rank."""
        return list(items[self.rank :: self.world])

    def gather(self, value: T, what: str) -> list[T]:
        """Every process's value, in rank order. `what` names it in the message when a process is lost."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        with self._watched(what):
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def collect(self, value: T, what: str) -> list[T] | None:
        """Every process's value in rank order on the first process, None on the others."""
        if self.world == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.world if self.first else None
        with self._watched(what):
            dist.gather_object(value, gathered, group=self.group)
        return gathered

    def share(self, value: T, what: str) -> T:
        """The first process's value, on every process; those of the others are left out."""
        if self.world == 1:
            return value
        held: list[Any] = [value if self.first else None]
        with self._watched(what):
            dist.broadcast_object_list(held, src=0, group=self.group)
        shared: T = held[0]
        return shared

    def sum(self, values: Mapping[str, float], what: str) -> dict[str, float]:
        """Sums by name; a name that only some processes have counts as 0 on the others."""
        total: dict[str, float] = {}
        for part in self.gather(dict(values), what):
            for name, value in part.items():
                total[name] = total.get(name, 0) + value
        return total

    def max(self, value: int, what: str) -> int:
        return max(self.gather(value, what))

    def exchange(self, parcels: Sequence[T], what: str) -> list[T]:
        """Give each process the parcel [world] that is for it; returns what each had for this one, in rank order."""
        if self.world == 1:
            return list(parcels)
        packed = [pickle.dumps(parcel) for parcel in parcels]
        sizes = self.gather([len(p) for p in packed], what)
        due = [size[self.rank] for size in sizes]
        received = torch.empty(sum(due), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
        with self._watched(what):
            dist.all_to_all_single(received, sent, due, [len(p) for p in packed], group=self.group)
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(due)]

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor over the processes, in place, over the group that gradients use."""
        if self.world == 1:
            return
        with self._watched("gradients"):
            for bucket in _buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the first one's tensors, in place."""
        if self.world == 1:
            return
        with self._watched("weights"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What fails inside for one process fails for all, with that process's message.

        Without this the others would wait at their next exchange for one that has ended.
        """
        failure: Exception | None = None
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            failure = error
        told = self.gather(None if failure is None else _tellable(failure), what)
        if failure is not None:
            raise failure
        for rank, heard in enumerate(told):
            if heard is not None:
                kind, text = heard
                raise kind(text if kind is not RankLost else f"process {rank} failed in '{what}': {text}")

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"process {self.rank} of {self.world} {lost_text(what, error)} {self.deadline:g} s "
                "(run.process_timeout); its own output says why"
            ) from error


def launched() -> tuple[int, int, int]:
    """(rank, world, local rank) as the launcher set them; (0, 1, 0) without one.

    Raises ConfigError when WORLD_SIZE is there and the rest is not.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1, int(os.environ.get("LOCAL_RANK", "0"))
    missing = [n for n in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={world} says that there are {world} processes, but {', '.join(missing)} is not set; "
            "start them with torchrun or `accelerate launch`"
        )
    return int(os.environ["RANK"]), world, int(os.environ["LOCAL_RANK"])


def start(device: str = "auto", deadline: float = DEADLINE) -> Ranks:
    """Join the other processes of this launch. `device` is the config's; call before the model is loaded.

    On GPUs each process takes the one that its local rank numbers. Raises ConfigError for what cannot work.
    """
    rank, world, local = launched()
    if world == 1:
        return Ranks(deadline=deadline)
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu and ":" in device:
        raise ConfigError(
            f"model.device = '{device}' is one GPU, and {world} processes need one each; write cuda, and choose GPUs "
            "with CUDA_VISIBLE_DEVICES"
        )
    if gpu:
        torch.cuda.set_device(local)
    patience = timedelta(seconds=deadline)
    if not dist.is_initialized():
        use_deepspeed(gpu).init_distributed(
            "nccl" if gpu else "gloo", timeout=patience, auto_mpi_discovery=False, verbose=False
        )
        atexit.register(_close_group)
    group = dist.new_group(backend="gloo", timeout=patience) if gpu else None
    return Ranks(rank, world, group, deadline)


def use_deepspeed(gpu: bool) -> Any:
    """The deepspeed module, told which accelerator to use, for it would take a GPU where there is one."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpu else "cpu")
    import deepspeed
    import deepspeed.ops

    # what DeepSpeed calls under its old name is not the user's affair
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not gpu:  # else it would compile a C++ exchange for inference, which nothing here calls
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def _close_group() -> None:
    """End the group before the interpreter ends: gloo's threads, left running, can abort a finished process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def open_group_alone(gpu: bool) -> None:
    """A process group of one, for DeepSpeed, which does nothing without one."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=0, world_size=1)


def lost_text(what: str, error: RuntimeError) -> str:
    """The middle of a message about a lost process; the number of seconds that one waits for it follows."""
    lines = str(error).strip().splitlines()
    reason = lines[0][:200] if lines else "no reason given"
    return f"lost another one while exchanging '{what}' ({reason}): it failed, ended, or took longer than"


def _tellable(error: Exception) -> tuple[type[Exception], str]:
    """The error's class where it is one of ours, so that each process ends with the same exit code."""
    ours = (c for c in type(error).__mro__ if c.__module__ == UserError.__module__)
    if isinstance(error, (UserError, GuardStop)):
        return next(ours), str(error)
    return RankLost, f"{type(error).__name__}: {error}"


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
