"""Broadcasts of weights from the learner to the workers of one server, with a deadline: what both ends know.

Tensors travel one by one, as bytes (`as_bytes`). Which ones come (`Tensors`) is told beside them, in JSON, for a chunk
of them at a time.

The learner is rank 0; a server's workers follow. Each server has a group of its own with the learner, so one that dies
or hangs costs its own deadline, and the others take no notice; one that comes back, or joins late, gets a new group.
Nothing touches torch's default group, which is the trainer's (or vLLM's own).

The rendezvous listens at the learner's `host` alone, as gloo's connections do. It has no password: whoever reaches that
port while a group is made could join it, so across hosts it belongs into a network of your own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from mm_grpo.errors import EngineError
from mm_grpo.rollout.vllm.launch import first_line

CHUNK_BYTES = 512 << 20
Tensors = list[tuple[str, str, list[int]]]
"""Name, dtype (`bfloat16`) and shape of each tensor of a chunk, in order."""
POLL = 0.0005
"""Seconds between two looks at a broadcast."""


def chunks(
    tensors: Iterable[tuple[str, Tensor]], limit: int = CHUNK_BYTES
) -> Iterator[list[tuple[str, Tensor]]]:
    """`tensors` in order, in lists of at most `limit` bytes each; a larger tensor is a list of its own.

    A tensor is detached, and not copied.
    """
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            yield held
            held, size = [], 0
        held.append((name, tensor.detach()))
        size += tensor.nbytes
    if held:
        yield held


def described(chunk: Sequence[tuple[str, Tensor]]) -> Tensors:
    """What a chunk holds."""
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in chunk]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8)


def received(held: Tensors, group: BroadcastGroup) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a chunk, as they are broadcast."""
    for name, dtype, shape in held:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        group.broadcast(as_bytes(tensor))
        yield name, tensor


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at `host`, at any port by default; at an IPv6 address for IPv4 too, as vLLM does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=":" in host)


class BroadcastGroup:
    """Rank `rank` of a group of `size`, which broadcasts from rank 0. Each call ends within `timeout` seconds.

    Blocks until all have joined; the learner passes the `listener` at the port it announced, which is the group's from
    then on, the others its host and port. Raises EngineError where they do not join in time.
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
        import torch.distributed as dist

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
            own = host if listener is not None else own_address(host)
            self._group = _process_group(backend, self._store, rank, size, limit, own)
            if size > 1:  # a first broadcast makes the connections, within the deadline too
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
        """Rank 0's `buffer` into everybody's. EngineError past the deadline, or once another thread has called `abort`.

        The group is of no use after an error.
        """
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        end = time.monotonic() + self.timeout
        if not buffer.numel():
            return
        try:
            self._work = self._group.broadcast([buffer], options)
            while not self._work.is_completed():  # not wait(): an abort of gloo's ends none
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
        """Leave the group without waiting for anybody."""
        self._aborted = True
        group, self._group = self._group, None
        if group is None:
            return
        if self.backend == "nccl":
            with suppress(Exception):  # it is broken already
                group.abort()
        _left[:] = [(one, work) for one, work in _left if work is not None and not work.is_completed()]
        _left.append((group, self._work))


_left: list[tuple[Any, Any]] = []
"""Groups that were left, with the broadcast that may still wait in them: to free one would wait for it."""


def own_address(host: str | None) -> str:
    """This machine's address as `host` reaches it; 127.0.0.1 without a host, or where nobody knows it."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host or "127.0.0.1", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # a datagram socket sends nothing when it is connected
            probe.connect(address)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _process_group(backend: str, store: Any, rank: int, size: int, limit: timedelta, host: str) -> Any:
    import torch.distributed as dist

    prefixed = dist.PrefixStore("mm_grpo", store)  # type: ignore[attr-defined]
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(prefixed, rank, size, options)
