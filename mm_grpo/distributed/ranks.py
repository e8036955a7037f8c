"""Ranks: rank, world size and object collectives of this process.

`start` reads what torchrun and `accelerate launch` set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and
joins the processes by accelerate's `PartialState`: gloo on the CPU, NCCL on GPUs. DeepSpeed finds that group. One
process opens none, and each method is then the identity. Objects go over gloo on the CPU, so that every wait has a
deadline that is kept. Gradients are reduced by `zero.py` and `optimizer.py`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mm_grpo.errors import ConfigError, GuardStop, UserError, shorten

DEADLINE = 1800.0
"""Seconds that a process waits for the others; a rollout may take one of them so much longer."""
STORE = "MM_GRPO_STORE"
"""Variable with the file over which the processes of `launch` find each other, in place of a port that others reach."""
BUCKET = 64 << 20
"""Elements that are summed over the processes at once."""

T = TypeVar("T")


class RankLost(RuntimeError):
    """Another process failed, ended, or kept this one waiting past the deadline."""


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and object collectives of this process.

    `group` is the gloo group that objects go over, `deadline` the seconds that a collective waits. Every collective
    takes `what`, the name of what is exchanged, and raises RankLost with it when another process is lost.
    """

    rank: int = 0
    world: int = 1
    group: Any = None
    deadline: float = DEADLINE

    @property
    def first(self) -> bool:
        """True when this is rank 0, which writes files and prints."""
        return self.rank == 0

    def second(self) -> Ranks:
        """The same processes over a gloo group of their own, for a second thread. Collective.

        A group belongs to one thread: calls of two would meet in any order. Only objects go over this one, not
        `all_reduce` and `broadcast_tensors`.
        """
        if self.world == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline))
        return replace(self, group=group)

    def shard(self, items: Sequence[T]) -> list[T]:
        """The items of this rank: every `world`-th one, starting at `rank`."""
        return list(items[self.rank :: self.world])

    def all_gather(self, value: T, what: str) -> list[T]:
        """The values of all ranks [world], on every rank."""
        if self.world == 1:
            return [value]
        return self._exchange([value] * self.world, what)

    def gather(self, value: T, what: str) -> list[T] | None:
        """The values of all ranks [world] on rank 0, None on the others."""
        if self.world == 1:
            return [value]
        gathered = self._exchange([value, *[None] * (self.world - 1)], what)
        return gathered if self.first else None

    def broadcast(self, value: T, what: str) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        result: T = self._exchange([value if self.first else None] * self.world, what)[0]
        return value if self.first else result

    def sum(self, values: Mapping[str, float], what: str) -> dict[str, float]:
        """Sums over the ranks by name; a name that a rank does not have counts as 0 there."""
        total: dict[str, float] = {}
        for part in self.all_gather(dict(values), what):
            for name, value in part.items():
                total[name] = total.get(name, 0) + value
        return total

    def max(self, value: int, what: str) -> int:
        """The largest value of any rank."""
        return max(self.all_gather(value, what))

    def all_to_all(self, parcels: Sequence[T], what: str) -> list[T]:
        """Send `parcels[r]` to rank r; returns what each rank sent to this one [world]."""
        if self.world == 1:
            return list(parcels)
        return self._exchange(parcels, what)

    def _exchange(self, parcels: Sequence[Any], what: str) -> list[Any]:
        """Send `parcels[r]` to rank r; returns the values that the ranks sent to this one [world]."""
        pickled = [pickle.dumps(parcel) for parcel in parcels]
        sizes = torch.tensor([len(p) for p in pickled])
        due = torch.empty_like(sizes)
        sent = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
        with self._watched(what):
            dist.all_to_all_single(due, sizes, group=self.group)
            received = torch.empty(int(due.sum()), dtype=torch.uint8)
            dist.all_to_all_single(received, sent, due.tolist(), sizes.tolist(), group=self.group)
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(due.tolist())]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks, in place, over the group that gradients use."""
        if self.world == 1:
            return
        with self._watched("gradients"):
            for bucket in _buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank with rank 0's, in place."""
        if self.world == 1:
            return
        with self._watched("weights"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    @contextmanager
    def fail_together(self, what: str) -> Iterator[None]:
        """Raise on every rank what is raised on one inside, with its message.

        Without this the others would wait in their next collective for a rank that has ended.
        """
        own: Exception | None = None
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            own = error
        errors = self.all_gather(None if own is None else _class_and_text(own), what)
        if own is not None:
            raise own
        for rank, sent in enumerate(errors):
            if sent is not None:
                kind, text = sent
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


def world_size() -> int:
    """The number of processes that the launcher started; 1 without one.

    Raises ConfigError when WORLD_SIZE is there and the rest is not, and for a number that cannot be.
    """
    world = _variable("WORLD_SIZE", 1, 10**6)
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 else ()
    if missing := [name for name in needed if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE={world} says that there are {world} processes, but {', '.join(missing)} is not set; "
            "start them with torchrun or `accelerate launch`"
        )
    for name, most in (("RANK", world - 1), ("LOCAL_RANK", world - 1), ("MASTER_PORT", 65535)):
        _variable(name, 0, most)
    return world


def _variable(name: str, least: int, most: int) -> int:
    text = os.environ.get(name, str(least))
    if re.fullmatch(r"[0-9]{1,9}", text) is None or not least <= int(text) <= most:
        raise ConfigError(
            f"{name}={shorten(text)}: must be a number from {least} to {most}; start the processes with torchrun or "
            "`accelerate launch`, which set it, or unset it"
        )
    return int(text)


def start(device: str = "auto", deadline: float = DEADLINE) -> Ranks:
    """Join the other processes of this launch. `device` is the config's; call before the model is loaded.

    On GPUs each process takes the one that its local rank numbers. Raises ConfigError for what cannot work.
    """
    world = world_size()
    if world == 1:
        return Ranks(deadline=deadline)
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu and ":" in device:
        raise ConfigError(
            f"model.device = '{device}' is one GPU, and {world} processes need one each; write cuda, and choose GPUs "
            "with CUDA_VISIBLE_DEVICES"
        )
    from accelerate import PartialState

    timeout, joined = timedelta(seconds=deadline), dist.is_initialized()
    place: dict[str, Any] = {}
    if file := os.environ.get(STORE):
        place = {"init_method": f"file://{file}", "rank": int(os.environ["RANK"]), "world_size": world}
    try:
        state = PartialState(cpu=not gpu, backend="nccl" if gpu else "gloo", timeout=timeout, **place)
    except (NotImplementedError, ValueError) as error:  # what accelerate knows of GPUs and hosts that cannot
        raise ConfigError(f"the {world} processes cannot be joined: {error}") from None
    if not joined:  # gloo's threads, left running, can abort a finished process
        atexit.register(state.destroy_process_group)
    group = dist.new_group(backend="gloo", timeout=timeout) if gpu else None
    return Ranks(state.process_index, world, group, deadline)


def joined_others() -> bool:
    """True when this process is in a group of several."""
    return dist.is_initialized() and dist.get_world_size() > 1


def use_deepspeed(gpu: bool) -> Any:
    """The deepspeed module, set to the GPU or to the CPU, for it would take a GPU where there is one."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpu else "cpu")
    import deepspeed
    import deepspeed.ops

    # DeepSpeed calls functions of torch by their old names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not gpu:  # else it would compile a C++ exchange for inference, which nothing here calls
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def open_group_alone(gpu: bool) -> None:
    """Open a process group of one, which DeepSpeed needs."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=0, world_size=1)


def lost_text(what: str, error: RuntimeError) -> str:
    """The middle of a message about a lost process; the seconds that were waited for it follow."""
    lines = str(error).strip().splitlines()
    reason = lines[0][:200] if lines else "no reason given"
    return f"lost another one while exchanging '{what}' ({reason}): it failed, ended, or took longer than"


def _class_and_text(error: Exception) -> tuple[type[Exception], str]:
    """Encode an error for the other ranks: its class where it is one of ours, for the same exit code everywhere."""
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
