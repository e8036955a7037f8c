"""The learner's end of a weight transfer to servers: by files in a folder, or by broadcast over gloo or NCCL.

    pause -> start_weight_update -> update_weights (once per chunk) -> finish_weight_update -> digests of what was
    received -> reset caches -> resume -> name of the weights

on all servers at once, chunk by chunk, so that no more than a chunk is held twice. A server that fails or is late is
left out from there on and stays paused, because it holds a mixture. `rollout/weights.py` compares the digests.

A new kind is a subclass of `ServedTransfer`, a line in `transfer_of`, and its receiver in `plugin.py`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

from torch import Tensor

from mm_grpo.background import BackgroundThreads
from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.files import temporary_folder
from mm_grpo.rollout.engine import Digest
from mm_grpo.rollout.served.broadcast import CHUNK_BYTES, BroadcastGroup, as_bytes, chunks, describe, listen
from mm_grpo.rollout.served.client import ServerClient, ServerError, in_background, reading, wait
from mm_grpo.rollout.served.protocol import accounts, require_awake, weights_name

Chunk = Sequence[tuple[str, "Tensor"]]
Outcome = Mapping[str, "Digest | Exception"]
"""By a server's url: the digests of what it received, or the error for which it was left out."""
JOIN_TIMEOUT = 60.0
"""Most seconds that a server may take to join a group."""


class ServedTransfer(ABC):
    """Base of every kind. It keeps the newest tensors for servers that join late.

    Each call to a server ends within `timeout` seconds. The methods must not run at the same time.
    """

    kind: str
    chunk_bytes = CHUNK_BYTES
    shared = False
    """Servers sleep on the learner's GPUs between updates: one begins when weights, and ends when all, is awake."""

    def __init__(self, timeout: float = 300.0) -> None:
        self.run = secrets.token_hex(4)
        self._names: dict[str, str] = {}  # of the weights that were sent whole, by url
        self._group_names: dict[str, str] = {}  # names of the workers' groups, by url
        self.timeout, self.version = timeout, 0
        # a server has at most three calls at once, and one of them waits for the others
        self._threads = BackgroundThreads(256, "mm_grpo-transfer")

    def weights_name(self, version: int) -> str:
        """Return the servers' name of this run's weights: RUN:VERSION, RUN different for every transfer."""
        return f"{self.run}:{version}"

    def send(
        self, clients: Sequence[ServerClient], tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> Outcome:
        """Send `tensors`, whole layers, as weights number `version`. All are consumed even if no server is left."""
        self.version = version
        return self._update(clients, map(self.keep, chunks(tensors, self.chunk_bytes)))

    def catch_up(self, client: ServerClient) -> Digest | Exception:
        """Send a server all of the newest weights, whatever it holds. Only after a `send` that ended."""
        self._names.pop(client.url, None)
        return self._update([client], self.all_parts())[client.url]

    def close(self) -> None:
        self._threads.close()

    @abstractmethod
    def join(self, client: ServerClient, name: str) -> None:
        """Make a server ready for `transmit`. Its workers report `name` for as long as they are ready."""

    @abstractmethod
    def keep(self, chunk: Chunk) -> Any:
        """Keep a chunk, and return the part that `transmit` sends."""

    @abstractmethod
    def all_parts(self) -> Iterable[Any]:
        """Return all that is kept, as parts for `transmit`."""

    @abstractmethod
    def transmit(self, client: ServerClient, part: Any) -> None:
        """Send a part to one server."""

    def _update(self, clients: Sequence[ServerClient], parts: Iterable[Any]) -> Outcome:
        outcome: dict[str, Digest | Exception] = {}
        live = list(clients)

        def call_live(work: Callable[[ServerClient], Any]) -> None:
            """Run `work` on every live server at once. Store results that are not None, and drop failed servers."""
            calls = [(client, self._threads.submit(work, client)) for client in live]
            for client, call in calls:
                try:
                    answer = call.result()
                except (ServerError, EngineError) as error:
                    answer = error
                    live.remove(client)
                if answer is not None:
                    outcome[client.url] = answer

        call_live(self._begin)
        for part in parts:
            call_live(partial(self.transmit, part=part))
        call_live(self._finish)
        return outcome

    def _call(self, client: ServerClient, path: str, json: Any = None, **params: str) -> Any:
        return client.call(path, json, params=params or None, timeout=self.timeout)

    def _send_part(self, client: ServerClient, **part: Any) -> None:
        self._call(client, "/update_weights", {"update_info": part})

    def _begin(self, client: ServerClient) -> None:
        if self.shared:  # before the pause, which it ends in older versions
            self._call(client, "/wake_up", tags="weights")
        self._call(client, "/pause", mode="keep")
        workers = accounts(client, self.timeout)
        finished = all(account.finished for account in workers)
        name = self._names.pop(client.url, None)
        if name is not None and not (
            finished and wait(in_background(weights_name(client, self.timeout))) == name
        ):
            raise ServerError(
                client.url,
                "it does not hold the weights that it was sent last (it was restarted, or another run sent it weights) "
                "and needs all of them",
            )
        if any(account.group != self._group_names.get(client.url) for account in workers):
            name = secrets.token_hex(8)
            self.join(client, name)
            self._group_names[client.url] = name
        if not finished:
            # vLLM starts no update before an unfinished one has ended, which a failing call does
            with suppress(ServerError):
                self._call(client, "/update_weights", {"update_info": {}})
        self._call(client, "/start_weight_update")

    def _finish(self, client: ServerClient) -> Digest:
        self._call(client, "/finish_weight_update", {})
        digests = self._received(client)
        if self.shared:  # not before: keys and values take the memory that weights pass through
            self._call(client, "/wake_up", tags="kv_cache")
        answer = self._call(client, "/reset_prefix_cache", reset_running_requests="true")
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise ServerError(client.url, "vLLM did not reset its prefix cache")
        self._call(client, "/reset_encoder_cache")
        self._call(client, "/resume")
        if self.shared:
            require_awake(client, self.timeout)
        # last: the name says that all of the above is done
        name = self.weights_name(self.version)
        self._call(client, "/update_weight_version", {"new_version": name})
        self._names[client.url] = name
        return digests

    def _received(self, client: ServerClient) -> Digest:
        """Return the digests of a server's workers; for a tensor on which they differ two digests, which match none."""
        first, *more = [account.digests for account in accounts(client, self.timeout)]
        for worker, digests in enumerate(more, 1):
            if digests.keys() != first.keys():
                raise ServerError(client.url, f"workers 0 and {worker} received different tensors")
            first |= {
                name: f"{first[name]} {value}" for name, value in digests.items() if first[name] != value
            }
        return first


class FileTransfer(ServedTransfer):
    """Safetensors files in `folder`, which servers read; None makes a temporary folder for servers of this machine.

    The newest file of each tensor is kept for servers that join late: one copy of the weights, and a chunk. All is
    removed at the end; what a killed run left is removed by a later run.
    """

    kind = "file"

    def __init__(self, folder: str | None = None, timeout: float = 300.0) -> None:
        super().__init__(timeout)
        self._stack = ExitStack()
        parent = None if folder is None else Path(folder).expanduser().resolve()
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self.folder = self._stack.enter_context(temporary_folder("weights", parent))
        except OSError as error:
            raise ConfigError(
                f"rollout.server.folder = '{folder}': {error.strerror or error}; it has to be a folder that this "
                "process can write to and the servers can read"
            ) from None
        self._newest: dict[Path, set[str]] = {}  # by file, the tensors whose newest copy it holds
        self._count = 0

    def join(self, client: ServerClient, name: str) -> None:
        self._call(client, "/init_weight_transfer_engine", {"init_info": {"group": name}})

    def all_parts(self) -> list[tuple[Path, list[str]]]:
        return [(path, sorted(names)) for path, names in sorted(self._newest.items())]

    def keep(self, chunk: Chunk) -> tuple[Path, list[str]]:
        from safetensors.torch import save_file

        self._count += 1
        path, names = self.folder / f"{self._count:08d}.safetensors", [name for name, _ in chunk]
        # copies, because safetensors refuses tied tensors, which share memory
        save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in chunk}, path)
        for older, older_names in list(self._newest.items()):
            older_names -= set(names)
            if not older_names:
                del self._newest[older]
                older.unlink(missing_ok=True)
        self._newest[path] = set(names)
        return path, names

    def transmit(self, client: ServerClient, part: tuple[Path, list[str]]) -> None:
        path, names = part
        self._send_part(client, path=str(path), names=names)

    def close(self) -> None:
        super().close()
        self._stack.close()


class BroadcastTransfer(ServedTransfer):
    """Broadcasts of the `kind` gloo, through the hosts' memory, or nccl, from GPU to GPU, with a group for each server.

    `host` is the address of this machine that servers reach; the rendezvous and gloo listen only there. The host's
    memory keeps a copy of the weights.
    """

    def __init__(self, host: str = "127.0.0.1", timeout: float = 300.0, kind: str = "gloo") -> None:
        super().__init__(timeout)
        self.host, self.kind = host, kind
        self._groups: dict[str, BroadcastGroup] = {}
        self._tensors: dict[str, Tensor] = {}

    def join(self, client: ServerClient, name: str) -> None:
        self._leave(client)
        answer = client.call("/get_world_size", method="GET", timeout=self.timeout)
        with reading(client.url, "/get_world_size"):
            size = 1 + index(answer["world_size"])  # the learner is rank 0
        seconds = min(self.timeout, JOIN_TIMEOUT)
        listener = listen(self.host)
        port: int = listener.getsockname()[1]
        info = {"host": self.host, "port": port, "world_size": size, "timeout": self.timeout, "group": name}
        call = self._threads.submit(
            client.call, "/init_weight_transfer_engine", {"init_info": info}, timeout=seconds
        )
        with _during(client, call):
            group = BroadcastGroup(
                self.kind, self.host, port, rank=0, size=size, timeout=seconds, listener=listener
            )
        group.timeout = self.timeout
        self._groups[client.url] = group

    def keep(self, chunk: Chunk) -> Chunk:
        self._tensors |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in chunk}
        return chunk

    def all_parts(self) -> Iterable[Chunk]:
        return chunks(self._tensors.items(), self.chunk_bytes)

    def transmit(self, client: ServerClient, part: Chunk) -> None:
        group = self._groups[client.url]
        call = self._threads.submit(self._send_part, client, tensors=describe(part))
        call.add_done_callback(lambda future: group.abort() if future.exception() else None)
        try:
            with _during(client, call):
                for _, tensor in part:
                    group.broadcast(as_bytes(tensor.to(group.device).contiguous()))
        except ServerError:
            self._leave(client)
            raise

    def close(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
        super().close()

    def _leave(self, client: ServerClient) -> None:
        self._group_names.pop(client.url, None)
        if (group := self._groups.pop(client.url, None)) is not None:
            group.abort()


@contextmanager
def _during(client: ServerClient, call: Future[Any]) -> Iterator[None]:
    """Run the block while a server works on `call`, and wait for it. Raises the server's own error if there is one."""
    try:
        yield
    except EngineError as error:
        if call.done():
            call.result()
        raise ServerError(client.url, str(error)) from error
    call.result()


def kind_of(kind: str, device: str, folder: str | None, shared: bool = False) -> str:
    """Return the kind of a transfer; `auto` is nccl for a learner on GPUs of its own without a folder, else file."""
    automatic = "file" if device == "cpu" or folder is not None or shared else "nccl"
    return automatic if kind == "auto" else kind


def transfer_of(
    kind: str,
    *,
    device: str = "cpu",
    folder: str | None = None,
    host: str = "127.0.0.1",
    timeout: float = 300.0,
    shared: bool = False,
) -> ServedTransfer:
    """Make the transfer of `rollout.server.transfer`. `device` is the learner's, `host` its address for the servers."""
    kind = kind_of(kind, device, folder, shared)
    if kind == "file":
        return FileTransfer(folder, timeout)
    if folder is not None:
        raise ConfigError(
            f"rollout.server.folder = '{folder}': the transfer '{kind}' writes no files; leave one of the two out"
        )
    if kind == "nccl" and device == "cpu":
        raise ConfigError(
            "rollout.server.transfer = 'nccl': it needs a learner on a GPU; write file, or gloo"
        )
    return BroadcastTransfer(host, timeout, kind)
