"""Broadcasts of weights from the learner to the workers of one server, with a deadline: code of both ends.

Tensors travel one by one, as bytes (`as_bytes`); a call in JSON describes a chunk of them (`Tensors`).

The learner is rank 0; a server's workers follow. Each server has its own group with the learner, so a server that dies
or hangs costs only its own deadline; one that comes back or joins late gets a new group. torch's default group, which
belongs to the trainer (or vLLM), is not touched.

The rendezvous listens only at the learner's `host`, without a password: whoever reaches the port while a group is made
could join it, so use it across hosts only in a private network.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm_grpo.distributed.ranks import buckets
from mm_grpo.errors import EngineError
from mm_grpo.rollout.vllm.launch import first_line

CHUNK_BYTES = 512 << 20
Tensors = list[tuple[str, str, list[int]]]
"""Name, dtype (`bfloat16`) and shape of each tensor of a chunk, in order."""
POLL = 0.0005
"""Seconds between two polls of a broadcast."""


def chunks(
    tensors: Iterable[tuple[str, Tensor]], limit: int = CHUNK_BYTES
) -> Iterator[list[tuple[str, Tensor]]]:
    """Return `tensors` in order, detached, in lists of at most `limit` bytes; a larger tensor is a list of its own."""
    detached = ((name, tensor.detach()) for name, tensor in tensors)
    return buckets(detached, lambda pair: pair[1].nbytes, limit)


def describe(chunk: Sequence[tuple[str, Tensor]]) -> Tensors:
    """Return name, dtype and shape of each tensor of a chunk."""
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in chunk]


def as_bytes(tensor: Tensor) -> Tensor:
    """View the memory of a contiguous tensor as uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8)


def receive(tensors: Tensors, group: BroadcastGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a chunk as they are broadcast."""
    for name, dtype, shape in tensors:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        group.broadcast(as_bytes(tensor))
        yield name, tensor


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at `host`, at any port by default; an IPv6 one takes IPv4 too, as vLLM does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=":" in host)


class BroadcastGroup:
    """Rank of a group of `size` that broadcasts from rank 0. Each call ends within `timeout` seconds.

    The constructor blocks until all have joined, and raises EngineError if they do not join in time. The learner passes
    the `listener` at the port that it announced, and gives it up; the others pass its host and port.
    """

    def __init__(
        self,
        backend: str,
        host: str,
        port: int,
        *,
        rank: int,
        size: int,
        timeout: float,
        listener: socket.socket | None = None,
    ) -> None:
        self.backend, self.rank, self.size, self.timeout = backend, rank, size, timeout
        self._aborted = False
        self._work: Any = None
        self._group: Any = None
        limit = timedelta(seconds=timeout)
        try:
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                size,
                listener is not None,
                limit,
                wait_for_workers=True,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            address = host if listener is not None else own_address(host)
            self._group = _process_group(backend, self._store, rank, size, limit, address)
            if size > 1:  # the first broadcast makes the connections, also within the deadline
                self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"the {backend} group of {size} at {host}:{port} was not made within {timeout:g} s: {first_line(error)}"
            ) from error

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.backend == "gloo" else "cuda")

    def broadcast(self, buffer: Tensor) -> None:
        """Copy rank 0's `buffer` into that of every rank.

        Raises EngineError past the deadline, or once another thread has called `abort`; the group is unusable then.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        end = time.monotonic() + self.timeout
        if not buffer.numel():
            return
        try:
            self._work = self._group.broadcast([buffer], options)
            while not self._work.is_completed():  # not wait(), which no abort of gloo ends
                if self._aborted:
                    raise EngineError("the group was given up")
                if time.monotonic() > end:
                    raise TimeoutError(f"no end within {self.timeout:g} s")
                time.sleep(POLL)
            self._work.wait()
        except Exception as error:
            self.abort()
            raise EngineError(
                f"a broadcast of {buffer.numel():,} bytes over {self.backend} failed: {first_line(error)}"
            ) from error

    def abort(self) -> None:
        """Leave the group without waiting for other ranks."""
        self._aborted = True
        group, self._group = self._group, None
        if group is None:
            return
        if self.backend == "nccl":
            with suppress(Exception):  # it is broken already
                group.abort()
        _aborted[:] = [pair for pair in _aborted if pair[1] is not None and not pair[1].is_completed()]
        _aborted.append((group, self._work))


_aborted: list[tuple[Any, Any]] = []
"""Aborted groups with their last broadcast. It may still wait, and freeing the group would wait for it."""


def own_address(host: str | None) -> str:
    """Return this machine's address as `host` reaches it; 127.0.0.1 without a host, or if it is unknown."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host or "127.0.0.1", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # a datagram socket sends nothing when it is connected
            probe.connect(address)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _process_group(backend: str, store: Any, rank: int, size: int, limit: timedelta, host: str) -> Any:
    prefixed = dist.PrefixStore("mm_grpo", store)  # type: ignore[attr-defined]
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(prefixed, rank, size, options)
