"""A process group of the learner and the workers of one server, for broadcasts with a deadline.

The learner is rank 0; a server's workers follow. Each server has a group of its own with the learner, so one that dies
or hangs costs its own deadline, and the others take no notice; one that comes back, or joins late, gets a new group.
Nothing touches torch's default group, which is the trainer's (or vLLM's own).

The rendezvous listens at the learner's `host` alone, as gloo's connections do. It has no password: whoever reaches that
port while a group is made could join it, so across hosts it belongs into a network of your own.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from mm_grpo.errors import EngineError

BACKENDS = ("gloo", "nccl")
POLL = 0.0005
"""Seconds between two looks at a broadcast."""


class Listener:
    """A port at `host` that a rendezvous will listen on; `port` is known before the group is made."""

    def __init__(self, host: str) -> None:
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.bind((host, 0))
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]

    def detach(self) -> int:
        """The descriptor, which is the caller's from now on."""
        return self._socket.detach()

    def close(self) -> None:
        self._socket.close()


class Group:
    """Rank `rank` of a group of `size`, which broadcasts from rank 0. Each call ends within `timeout` seconds.

    Blocks until all have joined; the learner passes the `listener` it announced, the others its host and port. Raises
    EngineError where they do not join in time.
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
        listener: Listener | None = None,
    ) -> None:
        import torch.distributed as dist

        if backend not in BACKENDS:
            raise ValueError(f"backend '{backend}': must be one of {', '.join(BACKENDS)}")
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
            own = host if listener is not None else address_towards(host, port)
            self._group = _process_group(backend, self._store, rank, size, limit, own)
            if size > 1:  # a first broadcast makes the connections, within the deadline too
                self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"the {backend} group of {size} at {host}:{port} was not made within {timeout:g} s: "
                f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}"
            ) from error

    @property
    def device(self) -> torch.device:
        return (
            torch.device("cpu")
            if self.backend == "gloo"
            else torch.device("cuda", torch.cuda.current_device())
        )

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's `buffer` into everybody's. EngineError past the deadline, or once another thread has called `abort`.

        The group is of no use after an error.
        """
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        end = time.monotonic() + self.timeout
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
                f"a broadcast of {buffer.numel():,} bytes over {self.backend} failed: "
                f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}"
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


def init_info(host: str, port: int, *, workers: int, timeout: float, group: str) -> dict[str, Any]:
    """Describe the group to a server of so many workers: the learner is rank 0, they are the ranks after it."""
    return {
        "host": host,
        "port": port,
        "rank_offset": 1,
        "world_size": 1 + workers,
        "timeout": timeout,
        "group": group,
    }


def address_towards(host: str, port: int) -> str:
    """The address of this machine that `host` is reached from; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


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
