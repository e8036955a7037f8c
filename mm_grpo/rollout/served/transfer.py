"""The learner's end of a weight transfer to servers: by files in a folder, or by broadcast over gloo or NCCL.

    pause -> start_weight_update -> update_weights (a chunk each) -> finish_weight_update -> what was received -> reset
    caches -> resume -> the weights' name

on all servers at once, chunk by chunk, so that no more than a chunk is held twice. A server that fails, or is late, is
left out from there on and stays paused, for it holds a mixture; the others take no notice. What each received comes
back as digests, by name, for `rollout/weights.py` to compare; that a server's workers agree among themselves is looked
at here.

A new kind is a subclass of `ServedTransfer` with `handed_over` and `transmit`, a line in `transfer_of`, and its
receiver in `plugin.py`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.files import temporary_folder
from mm_grpo.rollout.served.broadcast import CHUNK_BYTES, BroadcastGroup, as_bytes, chunks, described, listen
from mm_grpo.rollout.served.client import ServerClient, ServerError, in_background, reading, wait
from mm_grpo.rollout.served.protocol import accounts, weights_name

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.rollout.engine import Digest

Chunk = Sequence[tuple[str, "Tensor"]]
Outcome = Mapping[str, "Digest | Exception"]
"""By a server's url: the digests of what it received, or why it was left out."""
JOIN_TIMEOUT = 60.0
"""Most seconds that a server may take to join a group."""


class ServedTransfer(ABC):
    """Base of every kind: the calls in their order, on all servers at once, each within `timeout` seconds.

    Each keeps the newest tensors, for servers that join late. Calls are not to overlap.
    """

    kind = ""

    def __init__(self, timeout: float = 300.0, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.run = secrets.token_hex(4)
        self._held_by: dict[str, str] = {}  # name of the weights, by url, of what was sent whole
        self._joined: dict[str, str] = {}  # by url, what `join` named its workers' group
        self.timeout, self.chunk_bytes, self.version = timeout, chunk_bytes, 0
        # a server has three calls at once at most, of which one waits for the others
        self._threads = ThreadPoolExecutor(max_workers=256, thread_name_prefix="mm_grpo-transfer")

    # what the engine asks --------------------------------------------------------------------

    def weights_name(self, version: int) -> str:
        """What servers call the weights of this run and number: RUN:VERSION, RUN different for every transfer."""
        return f"{self.run}:{version}"

    def send(
        self, clients: Sequence[ServerClient], tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> Outcome:
        """Bring `tensors`, whole layers, to the servers as weights number `version`. Takes all where none is left."""
        self.version = version
        return self._update(clients, map(self.handed_over, chunks(tensors, self.chunk_bytes)))

    def catch_up(self, client: ServerClient) -> Digest | Exception:
        """Bring a server to the weights sent last, all of them, whatever it holds. Only after a `send` that ended."""
        self._held_by.pop(client.url, None)
        return self._update([client], self.kept())[client.url]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # a kind's own ----------------------------------------------------------------------------

    @abstractmethod
    def join(self, client: ServerClient, name: str) -> None:
        """Make a server ready for `transmit`; its workers keep `name`, by which they are known to be so still."""

    @abstractmethod
    def handed_over(self, chunk: Chunk) -> Any:
        """Keep a chunk, and make what `transmit` sends of it."""

    @abstractmethod
    def kept(self) -> Iterable[Any]:
        """All that is kept, in parts for `transmit`."""

    @abstractmethod
    def transmit(self, client: ServerClient, part: Any) -> None:
        """Send a part to one server."""

    # the calls -------------------------------------------------------------------------------

    def _update(self, clients: Sequence[ServerClient], parts: Iterable[Any]) -> Outcome:
        outcome: dict[str, Digest | Exception] = {}
        live = list(clients)

        def on_live(work: Callable[[ServerClient], Any]) -> None:
            """On all servers that have not failed: note what came of it, where that is anything."""

            def one(client: ServerClient) -> Any:
                try:
                    return work(client)
                except (ServerError, EngineError) as error:
                    return error

            for client, answer in zip(tuple(live), self._threads.map(one, tuple(live)), strict=True):
                if answer is not None:
                    outcome[client.url] = answer
                if isinstance(answer, Exception):
                    live.remove(client)

        on_live(self._begin)
        for part in parts:
            on_live(lambda client, part=part: self.transmit(client, part))  # type: ignore[misc]
        on_live(self._finish)
        return outcome

    def _call(self, client: ServerClient, path: str, json: Any = None, **params: str) -> Any:
        return client.call(path, json, params=params or None, timeout=self.timeout)

    def _send_part(self, client: ServerClient, **part: Any) -> None:
        self._call(client, "/update_weights", {"update_info": part})

    def _begin(self, client: ServerClient) -> None:
        self._call(client, "/pause", mode="keep")
        workers = accounts(client, self.timeout)
        finished = all(account.finished for account in workers)
        held = self._held_by.pop(client.url, None)
        if held is not None and not (
            finished and wait(in_background(weights_name(client, self.timeout))) == held
        ):
            raise ServerError(
                client.url,
                "it does not hold the weights that it was sent last (it was restarted, or another run sent it some), "
                "and needs all of them",
            )
        if any(account.group != self._joined.get(client.url) for account in workers):
            name = secrets.token_hex(8)
            self.join(client, name)
            self._joined[client.url] = name
        if not finished:
            # One was begun and never finished, and vLLM begins no other: an update that fails ends it.
            with suppress(ServerError):
                self._call(client, "/update_weights", {"update_info": {}})
        self._call(client, "/start_weight_update")

    def _finish(self, client: ServerClient) -> Digest:
        self._call(client, "/finish_weight_update", {})
        digests = self._received(client)
        answer = self._call(client, "/reset_prefix_cache", reset_running_requests="true")
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise ServerError(client.url, "vLLM did not reset its prefix cache")
        self._call(client, "/reset_encoder_cache")
        self._call(client, "/resume")
        # last, for by its name a server is known to be done with all of this
        name = self.weights_name(self.version)
        self._call(client, "/update_weight_version", {"new_version": name})
        self._held_by[client.url] = name
        return digests

    def _received(self, client: ServerClient) -> Digest:
        """The digests of one server's workers, which receive the same; two digests of what one of them did not load."""
        first, *others = [account.digests for account in accounts(client, self.timeout)]
        for place, other in enumerate(others, 1):
            if other.keys() != first.keys():
                raise ServerError(client.url, f"workers 0 and {place} received different tensors")
            first |= {name: f"{first[name]} {value}" for name, value in other.items() if first[name] != value}
        return first


class FileTransfer(ServedTransfer):
    """Safetensors files in `folder`, which servers read; null is one of this machine's, for servers on it.

    Each tensor's newest file is kept until another replaces it, so a server that joins late can be brought up at any
    time: one copy of the weights, and a chunk. All is removed at the end, and by a later run what a killed one left.
    """

    kind = "file"

    def __init__(
        self, folder: str | None = None, timeout: float = 300.0, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(timeout, chunk_bytes)
        self._held = ExitStack()
        parent = None if folder is None else Path(folder).expanduser().resolve()
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self.folder = self._held.enter_context(temporary_folder("weights", parent))
        except OSError as error:
            raise ConfigError(
                f"rollout.server.folder = '{folder}': {error.strerror or error}; it has to be a folder that this "
                "process can write to and the servers can read"
            ) from None
        self._current: dict[Path, set[str]] = {}  # names of the tensors whose newest copy a file has
        self._count = 0

    def join(self, client: ServerClient, name: str) -> None:
        self._call(client, "/init_weight_transfer_engine", {"init_info": {"group": name}})

    def kept(self) -> list[tuple[Path, list[str]]]:
        return [(path, sorted(names)) for path, names in sorted(self._current.items())]

    def handed_over(self, chunk: Chunk) -> tuple[Path, list[str]]:
        from safetensors.torch import save_file

        self._count += 1
        path, names = self.folder / f"{self._count:08d}.safetensors", [name for name, _ in chunk]
        # a copy of each: tied tensors share memory, which the format does not have
        save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in chunk}, path)
        for older, held in list(self._current.items()):
            held -= set(names)
            if not held:
                del self._current[older]
                older.unlink(missing_ok=True)
        self._current[path] = set(names)
        return path, names

    def transmit(self, client: ServerClient, part: tuple[Path, list[str]]) -> None:
        path, names = part
        self._send_part(client, path=str(path), names=names)

    def close(self) -> None:
        super().close()
        self._held.close()


class GlooTransfer(ServedTransfer):
    """Broadcasts over gloo, through the hosts' memory, a group for each server.

    `host` is the address of this machine that servers reach; the rendezvous and gloo listen there alone. The host's
    memory keeps a copy of the weights.
    """

    kind = "gloo"

    def __init__(
        self, host: str = "127.0.0.1", timeout: float = 300.0, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(timeout, chunk_bytes)
        self.host = host
        self._groups: dict[str, BroadcastGroup] = {}
        self._kept: dict[str, Tensor] = {}

    def join(self, client: ServerClient, name: str) -> None:
        self._leave(client)
        answer = client.call("/get_world_size", method="GET", timeout=self.timeout)
        with reading(client.url, "/get_world_size"):
            size = 1 + index(answer["world_size"])  # the learner is rank 0
        seconds = min(self.timeout, JOIN_TIMEOUT)
        listener = listen(self.host)
        port: int = listener.getsockname()[1]
        info = {"host": self.host, "port": port, "world_size": size, "timeout": self.timeout, "group": name}
        asked = self._threads.submit(
            client.call, "/init_weight_transfer_engine", {"init_info": info}, timeout=seconds
        )
        try:
            group = BroadcastGroup(
                self.kind, self.host, port, rank=0, size=size, timeout=seconds, listener=listener
            )
        except EngineError:
            if asked.done():  # the server's own error, where it has one
                asked.result()
            raise
        asked.result()
        group.timeout = self.timeout
        self._groups[client.url] = group

    def handed_over(self, chunk: Chunk) -> Chunk:
        self._kept |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in chunk}
        return chunk

    def kept(self) -> Iterable[Chunk]:
        return chunks(self._kept.items(), self.chunk_bytes)

    def transmit(self, client: ServerClient, part: Chunk) -> None:
        group = self._groups[client.url]
        asked = self._threads.submit(self._send_part, client, tensors=described(part))
        asked.add_done_callback(lambda future: group.abort() if future.exception() else None)
        try:
            for _, tensor in part:
                group.broadcast(as_bytes(tensor.to(group.device).contiguous()))
            asked.result()
        except EngineError as error:
            self._leave(client)
            if asked.done():  # the server's own error, where it has one
                asked.result()
            raise EngineError(f"{client.url}: {error}") from error
        except ServerError:
            self._leave(client)
            raise

    def close(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
        super().close()

    def _leave(self, client: ServerClient) -> None:
        self._joined.pop(client.url, None)
        if (group := self._groups.pop(client.url, None)) is not None:
            group.abort()


class NcclTransfer(GlooTransfer):
    """Broadcasts over NCCL, from the learner's GPU to the servers'."""

    kind = "nccl"


def kind_of(kind: str, device: str, folder: str | None) -> str:
    """The kind; of `auto` nccl for a learner on a GPU without a folder, else file."""
    if kind == "auto":
        return "file" if device == "cpu" or folder is not None else "nccl"
    return kind


def transfer_of(
    kind: str,
    *,
    device: str = "cpu",
    folder: str | None = None,
    host: str = "127.0.0.1",
    timeout: float = 300.0,
) -> ServedTransfer:
    """The transfer of `rollout.server.transfer`.

    `device` is the learner's, `host` its address as servers reach it, `timeout` the deadline of every call in seconds.
    """
    kind = kind_of(kind, device, folder)
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
    return NcclTransfer(host, timeout) if kind == "nccl" else GlooTransfer(host, timeout)
