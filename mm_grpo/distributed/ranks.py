"""Ranks: rank, world size and object collectives of this process.

`start` reads what torchrun and `accelerate launch` set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and
joins the processes by accelerate's `PartialState`: gloo on the CPU, NCCL on GPUs. DeepSpeed finds that group. One
process opens none, and each method is then the identity. Objects go over gloo on the CPU, which keeps the
deadline of every wait. Gradients are reduced by `zero.py` and `optimizer.py`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Variable with the file by which the processes of `launch` find each other; a port would be open to others."""
BUCKET = 64 << 20
"""Elements that are summed over the processes at once."""

T = TypeVar("T")


class RankLost(RuntimeError):
    """Another process failed, ended, or kept this one waiting past the deadline."""


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and object collectives of this process.

    `group` is the gloo group that objects go over, `deadline` the seconds that a collective waits. Every collective
    takes a `label` for messages, and raises RankLost with it if another process is lost.
    """

    rank: int = 0
    world: int = 1
    group: Any = None
    deadline: float = DEADLINE

    @property
    def first(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self.rank == 0

    def second(self) -> Ranks:
        """Return the same ranks over a new gloo group for a second thread. Collective.

        Only objects go over it, not `all_reduce` and `broadcast_tensors`.
        """
        if self.world == 1:
            return self
        # calls of two threads over one group would meet in any order
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline))
        return replace(self, group=group)

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return the items of this rank: every `world`-th, starting at `rank`."""
        return list(items[self.rank :: self.world])

    def all_gather(self, value: T, label: str) -> list[T]:
        """Return the values of all ranks [world], on every rank."""
        if self.world == 1:
            return [value]
        return self._exchange([value] * self.world, label)

    def gather(self, value: T, label: str) -> list[T] | None:
        """Return the values of all ranks [world] on rank 0, None on the others."""
        if self.world == 1:
            return [value]
        gathered = self._exchange([value, *[None] * (self.world - 1)], label)
        return gathered if self.first else None

    def broadcast(self, value: T, label: str) -> T:
        """Return rank 0's value, on every rank."""
        if self.world == 1:
            return value
        result: T = self._exchange([value if self.first else None] * self.world, label)[0]
        return value if self.first else result

    def sum(self, values: Mapping[str, float], label: str) -> dict[str, float]:
        """Return sums over the ranks by name; a name that a rank does not have counts as 0 there."""
        total: dict[str, float] = {}
        for part in self.all_gather(dict(values), label):
            for name, value in part.items():
                total[name] = total.get(name, 0) + value
        return total

    def max(self, value: int, label: str) -> int:
        """Return the largest value of any rank."""
        return max(self.all_gather(value, label))

    def all_to_all(self, values: Sequence[T], label: str) -> list[T]:
        """Send `values[r]` to rank r; return the values that the ranks sent to this one [world]."""
        if self.world == 1:
            return list(values)
        return self._exchange(values, label)

    def _exchange(self, values: Sequence[Any], label: str) -> list[Any]:
        pickled = [pickle.dumps(value) for value in values]
        out_sizes = torch.tensor([len(p) for p in pickled])
        in_sizes = torch.empty_like(out_sizes)
        out = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
        with self._raise_rank_lost(label):
            dist.all_to_all_single(in_sizes, out_sizes, group=self.group)
            received = torch.empty(int(in_sizes.sum()), dtype=torch.uint8)
            dist.all_to_all_single(received, out, in_sizes.tolist(), out_sizes.tolist(), group=self.group)
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(in_sizes.tolist())]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks, in place, over the group that gradients use."""
        if self.world == 1:
            return
        with self._raise_rank_lost("gradients"):
            for bucket in buckets(tensors, Tensor.numel, BUCKET):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank with rank 0's, in place."""
        if self.world == 1:
            return
        with self._raise_rank_lost("weights"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    @contextmanager
    def fail_together(self, label: str) -> Iterator[None]:
        """Raise on every rank what is raised on one inside, with its message.

        Otherwise the others would wait in their next collective for a rank that has ended.
        """
        local_error: Exception | None = None
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            local_error = error
        errors = self.all_gather(None if local_error is None else _class_and_text(local_error), label)
        if local_error is not None:
            raise local_error
        for rank, error_pair in enumerate(errors):
            if error_pair is not None:
                kind, text = error_pair
                raise kind(text if kind is not RankLost else f"process {rank} failed in '{label}': {text}")

    @contextmanager
    def _raise_rank_lost(self, label: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"process {self.rank} of {self.world} {lost_text(label, error)} {self.deadline:g} s "
                "(run.process_timeout); its own output says why"
            ) from error


def world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher.

    Raises ConfigError if WORLD_SIZE is set and the other variables are not, or if one of them is no legal number.
    """
    world = _variable("WORLD_SIZE", 1, 10**6)
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 else ()
    if missing := [name for name in needed if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE={world} says that there are {world} processes, but {', '.join(missing)} is not set; "
            "start them with torchrun or `accelerate launch`"
        )
    for name, largest in (("RANK", world - 1), ("LOCAL_RANK", world - 1), ("MASTER_PORT", 65535)):
        _variable(name, 0, largest)
    return world


def _variable(name: str, low: int, high: int) -> int:
    text = os.environ.get(name, str(low))
    if re.fullmatch(r"[0-9]{1,9}", text) is None or not low <= int(text) <= high:
        raise ConfigError(
            f"{name}={shorten(text)}: must be a number from {low} to {high}; start the processes with torchrun or "
            "`accelerate launch`, which set it, or unset it"
        )
    return int(text)


def start(device: str = "auto", deadline: float = DEADLINE) -> Ranks:
    """Join the other processes of this launch. `device` is the config's; call before the model is loaded.

    On GPUs each process takes the GPU of its local rank. Raises ConfigError if the processes cannot be joined.
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
    except (NotImplementedError, ValueError) as error:  # accelerate's, for GPUs and hosts that it cannot use
        raise ConfigError(f"the {world} processes cannot be joined: {error}") from None
    if not joined:  # gloo's threads, left running, can abort a finished process
        atexit.register(state.destroy_process_group)
    group = dist.new_group(backend="gloo", timeout=timeout) if gpu else None
    return Ranks(state.process_index, world, group, deadline)


def joined_others() -> bool:
    """Return True if this process is in a group of several."""
    return dist.is_initialized() and dist.get_world_size() > 1


def use_deepspeed(gpu: bool) -> Any:
    """Return the deepspeed module, set to the GPU or to the CPU."""
    # by itself it would take any GPU that it sees
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpu else "cpu")
    import deepspeed
    import deepspeed.ops

    # DeepSpeed calls functions of torch by their old names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not gpu:  # else it would compile a C++ exchange for inference, which nothing here calls
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def open_group_alone(backend: str) -> None:
    """Open a process group of one, which DeepSpeed and vLLM need, if none is open."""
    if not dist.is_initialized():
        # in memory: a group of one needs neither port nor file
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def lost_text(label: str, error: RuntimeError) -> str:
    """Return the middle of a message about a lost process; the seconds that it was waited for follow."""
    lines = str(error).strip().splitlines()
    reason = lines[0][:200] if lines else "no reason given"
    return f"lost another one while exchanging '{label}' ({reason}): it failed, ended, or took longer than"


def _class_and_text(error: Exception) -> tuple[type[Exception], str]:
    """Encode an error for the other ranks, with its class if it is one of ours, so that all have one exit code."""
    if isinstance(error, (UserError, GuardStop)):
        return next(c for c in type(error).__mro__ if c.__module__ == UserError.__module__), str(error)
    return RankLost, f"{type(error).__name__}: {error}"


def buckets(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield `items` in order, in lists whose sizes add up to at most `limit`; a larger item is a list of its own."""
    bucket, total = list[T](), 0
    for item in items:
        if bucket and total + size_of(item) > limit:
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size_of(item)
    if bucket:
        yield bucket
