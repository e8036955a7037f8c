"""The learner's end of a weight transfer to servers: by files in a folder, or by broadcast over gloo or NCCL.

    pause -> start_weight_update -> update_weights (a chunk each) -> finish_weight_update -> what was received -> reset
    caches -> resume

on all servers at once, chunk by chunk, so that no more than a chunk is held twice. A server that fails, or is late, is
left out from there on and stays paused, for it holds a mixture; the others take no notice. What each received comes
back as digests, by name, for `rollout/weights.py` to compare; that the servers' workers agree among themselves, that
the version is the one sent and that no earlier update was left half done is looked at here.

A new kind is a subclass of `ServedTransfer` with `handed_over` and `transmit`, and its receiver in
`plugin_engines.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.files import temporary_folder
from mm_grpo.rollout.served.chunks import CHUNK_BYTES, Meta, chunks, pack
from mm_grpo.rollout.served.client import ServerClient, ServerError, reading
from mm_grpo.rollout.served.groups import Group, Listener, init_info
from mm_grpo.rollout.served.protocol import WorkerAccount, accounts

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.rollout.engine import Digest

Chunk = Sequence[tuple[str, "Tensor"]]
Outcome = Mapping[str, "Digest | Exception"]
"""By a server's url: the digests of what it received, or why it was left out."""
JOIN_TIMEOUT = 60.0
"""Most seconds that a server may take to join a group."""
KINDS = ("auto", "file", "gloo", "nccl")


class ServedTransfer:
    """Base of every kind: the calls in their order, on all servers at once, each within `timeout` seconds.

    `backend` is what servers are started with (`--weight-transfer-config`); `keeps_weights` says whether `catch_up` can
    bring the weights sent last, once a `send` has gone through all tensors. Calls are not to overlap.
    """

    kind = ""
    keeps_weights = False

    def __init__(self, timeout: float = 300.0, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.run = secrets.token_hex(4)
        self._held_by: dict[str, str] = {}  # name of the weights, by url, of what was sent whole
        self.timeout, self.chunk_bytes = timeout, chunk_bytes
        self.backend = f"mm_grpo_{self.kind}"
        self._pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="mm_grpo-transfer")
        self._calls = ThreadPoolExecutor(max_workers=64, thread_name_prefix="mm_grpo-transfer-call")

    # what the engine asks --------------------------------------------------------------------

    def weights_name(self, version: int) -> str:
        """What servers call the weights of this run and number: RUN:VERSION, RUN different for every transfer."""
        return f"{self.run}:{version}"

    def connect(self, clients: Sequence[ServerClient]) -> None:
        """Join these servers, each for itself, anew where one is joined. Raises ServerError for the first that cannot
        be."""
        for error in self._on_all(list(clients), self._join).values():
            if isinstance(error, Exception):
                raise error

    def send(
        self, clients: Sequence[ServerClient], tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> Outcome:
        """Bring `tensors`, whole layers, to the servers as weights number `version`."""
        return self._update(
            clients,
            version,
            (self.handed_over(chunk, version) for chunk in chunks(tensors, self.chunk_bytes)),
        )

    def forget(self, client: ServerClient) -> None:
        """What is sent to this server next will be all of the weights, whatever it holds."""
        self._held_by.pop(client.url, None)

    def catch_up(self, clients: Sequence[ServerClient]) -> Outcome | None:
        """Bring servers that joined late to the weights sent last, all of them; None where nothing is kept."""
        return None

    def close(self) -> None:
        for pool in (self._pool, self._calls):
            pool.shutdown(wait=False, cancel_futures=True)

    # a kind's own ----------------------------------------------------------------------------

    def join(self, client: ServerClient) -> None:
        """Make a server ready for `transmit`."""

    def joined(self, client: ServerClient, account: WorkerAccount) -> bool:
        """Whether a server with this account of its worker is still ready."""
        return True

    def handed_over(self, chunk: Chunk, version: int) -> AbstractContextManager[Any]:
        """A block in which servers can take a chunk; its value is for `transmit`."""
        raise NotImplementedError

    def transmit(self, client: ServerClient, handed: Any) -> None:
        """Send the chunk to one server."""
        raise NotImplementedError

    # the calls -------------------------------------------------------------------------------

    def _update(
        self,
        clients: Sequence[ServerClient],
        version: int,
        parts: Iterable[AbstractContextManager[Any]],
    ) -> Outcome:
        outcome: dict[str, Digest | Exception] = {}
        live = list(clients)

        def on_live(work: Callable[[ServerClient], Any]) -> None:
            answers = self._on_all(live, work)
            for client in list(live):
                answer = answers[client.url]
                if isinstance(answer, Exception):
                    outcome[client.url] = answer
                    live.remove(client)
                elif answer is not None:
                    outcome[client.url] = answer

        on_live(self._begin)
        part: AbstractContextManager[Any] | None = None
        for part in parts:
            if not live and not self.keeps_weights:
                break
            with part as handed:
                on_live(lambda client: self.transmit(client, handed))
        if (
            part is None
        ):  # nothing has changed, as at a learning rate of 0; the weights have a new name all the same
            info = {"version": version, "weights_name": self.weights_name(version), "metas": []}
            on_live(
                lambda client: client.call("/update_weights", {"update_info": info}, timeout=self.timeout)
            )
        on_live(lambda client: self._finish(client, version))
        return outcome

    def _begin(self, client: ServerClient) -> None:
        client.call("/pause", params={"mode": "keep"}, timeout=self.timeout)
        workers = accounts(client, self.timeout)
        held = self._held_by.pop(client.url, None)
        if held is not None and any(account.weights_name != held for account in workers):
            raise ServerError(
                client.url,
                "it does not hold the weights that it was sent last (it was restarted, or another run sent it some), "
                "and needs all of them",
            )
        if not all(self.joined(client, account) for account in workers):
            self._join(client)
        if not all(account.finished for account in workers):
            # One was begun and never finished, and vLLM begins no other: an update that fails ends it.
            with suppress(ServerError):
                client.call("/update_weights", {"update_info": {"version": -1}}, timeout=self.timeout)
        client.call("/start_weight_update", timeout=self.timeout)

    def _finish(self, client: ServerClient, version: int) -> Digest:
        client.call(
            "/finish_weight_update", {"weight_version": self.weights_name(version)}, timeout=self.timeout
        )
        digests = self._received(client, version)
        # Requests that were paused in their midst begin anew under the new weights; else vLLM keeps what they hold.
        answer = client.call(
            "/reset_prefix_cache", params={"reset_running_requests": "true"}, timeout=self.timeout
        )
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise ServerError(client.url, "vLLM did not reset its prefix cache")
        client.call("/reset_encoder_cache", timeout=self.timeout)
        client.call("/resume", timeout=self.timeout)
        return digests

    def _received(self, client: ServerClient, version: int) -> Digest:
        """The digests of one server's workers, which have to agree: tensor-parallel ones receive the same."""
        first, *others = received = accounts(client, self.timeout)
        for place, account in enumerate(received):
            if account.version is not None and account.version != version:
                raise ServerError(
                    client.url,
                    f"worker {place} received version {account.version} where {version} was sent",
                )
            if account.damaged or not account.finished:
                raise ServerError(
                    client.url,
                    "an earlier update was given up half-way; it needs one that brings every tensor",
                )
        for place, account in enumerate(others, 1):
            if account.digests != first.digests:
                raise ServerError(client.url, f"workers 0 and {place} received different tensors")
        self._held_by[client.url] = first.weights_name
        return dict(first.digests)

    def _join(self, client: ServerClient) -> None:
        accounts(client, self.timeout)
        self.join(client)

    def _on_all(self, clients: Sequence[ServerClient], work: Callable[[ServerClient], Any]) -> dict[str, Any]:
        """`work` of every client at once: its value or its exception, by url."""

        def one(client: ServerClient) -> Any:
            try:
                return work(client)
            except (ServerError, EngineError) as error:
                return error

        return dict(zip([c.url for c in clients], self._pool.map(one, clients), strict=True))


class FileTransfer(ServedTransfer):
    """Safetensors files in `folder`, which servers read; null is one of this machine's, for servers on it.

    Each tensor's newest file is kept until another replaces it, so a server that joins late can be brought up at any
    time: one copy of the weights, and a chunk. All is removed at the end, and by a later run what a killed one left.
    """

    kind = "file"
    keeps_weights = True

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
            self._token = secrets.token_hex(16)
            (self.folder / "token").write_text(self._token)
        except OSError as error:
            raise ConfigError(
                f"rollout.server.folder = '{folder}': {error.strerror or error}; it has to be a folder that this "
                "process can write to and the servers can read"
            ) from None
        self._current: dict[Path, set[str]] = {}
        self._version: int | None = None
        self._count = 0

    def join(self, client: ServerClient) -> None:
        info = {"folder": str(self.folder), "token": self._token}
        client.call("/init_weight_transfer_engine", {"init_info": info}, timeout=self.timeout)

    def send(
        self, clients: Sequence[ServerClient], tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> Outcome:
        self._version = None  # until all is written, the files are a mixture
        outcome = super().send(clients, tensors, version)
        self._version = version
        return outcome

    def catch_up(self, clients: Sequence[ServerClient]) -> Outcome | None:
        version = self._version
        if version is None:
            return None
        files = sorted(self._current.items())
        return self._update(
            clients, version, (nullcontext((path, sorted(names), version)) for path, names in files)
        )

    @contextmanager
    def handed_over(self, chunk: Chunk, version: int) -> Iterator[tuple[Path, list[str], int]]:
        from safetensors.torch import save_file

        self._count += 1
        path, names = self.folder / f"{self._count:08d}.safetensors", [name for name, _ in chunk]
        try:
            # a copy of each: tied tensors share memory, which the format does not have
            save_file(
                {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in chunk}, path
            )
        except OSError as error:
            path.unlink(missing_ok=True)
            raise EngineError(
                f"rollout.server.folder: the weights could not be written to '{self.folder}': "
                f"{error.strerror or error}; it needs room for one copy of the model"
            ) from error
        for older, held in list(self._current.items()):
            held -= set(names)
            if not held:
                del self._current[older]
                older.unlink(missing_ok=True)
        self._current[path] = set(names)
        yield path, names, version

    def transmit(self, client: ServerClient, handed: tuple[Path, list[str], int]) -> None:
        path, names, version = handed
        name = self.weights_name(version)
        info = {"path": str(path), "names": names, "version": version, "weights_name": name}
        client.call("/update_weights", {"update_info": info}, timeout=self.timeout)

    def close(self) -> None:
        super().close()
        self._held.close()


class GroupTransfer(ServedTransfer):
    """Broadcasts over gloo (through the hosts' memory) or NCCL (from GPU to GPU), a group for each server.

    `host` is the address of this machine that servers reach; the rendezvous and gloo listen there alone.
    """

    def __init__(
        self,
        kind: str,
        host: str = "127.0.0.1",
        timeout: float = 300.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.kind = kind
        super().__init__(timeout, chunk_bytes)
        self.host = host
        self._groups: dict[str, tuple[str, Group]] = {}

    def join(self, client: ServerClient) -> None:
        self._leave(client)
        answer = client.call("/get_world_size", method="GET", timeout=self.timeout)
        with reading(client.url, "/get_world_size"):
            size = index(answer["world_size"])
        seconds = min(self.timeout, JOIN_TIMEOUT)
        listener, name = Listener(self.host), secrets.token_hex(8)
        info = init_info(self.host, listener.port, workers=size, timeout=self.timeout, group=name)
        asked = self._calls.submit(
            client.call, "/init_weight_transfer_engine", {"init_info": info}, timeout=seconds
        )
        made = self._calls.submit(
            Group,
            self.kind,
            self.host,
            listener.port,
            rank=0,
            size=info["world_size"],
            timeout=seconds,
            listener=listener,
        )
        # a server that refuses is not waited for; the library's own start may keep no deadline
        wait((asked, made), timeout=seconds + 1.0, return_when=FIRST_EXCEPTION)
        if asked.done():
            asked.result()
        if not made.done():
            raise EngineError(f"{client.url}: no {self.kind} group with it within {seconds:g} s")
        group = made.result()
        asked.result()
        group.timeout = self.timeout
        self._groups[client.url] = name, group

    def joined(self, client: ServerClient, account: WorkerAccount) -> bool:
        return client.url in self._groups and account.group == self._groups[client.url][0]

    @contextmanager
    def handed_over(self, chunk: Chunk, version: int) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        device = next((group.device for _, group in self._groups.values()), "cpu")
        metas = [Meta.of(name, tensor).as_json() for name, tensor in chunk]
        info = {"metas": metas, "version": version, "weights_name": self.weights_name(version)}
        yield pack(chunk, device), info

    def transmit(self, client: ServerClient, handed: tuple[Tensor, dict[str, Any]]) -> None:
        buffer, info = handed
        group = self._groups[client.url][1]
        asked = self._calls.submit(
            client.call, "/update_weights", {"update_info": info}, timeout=self.timeout
        )
        asked.add_done_callback(lambda future: group.abort() if future.exception() else None)
        try:
            group.broadcast(buffer)
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
        for _, group in self._groups.values():
            group.abort()
        self._groups.clear()
        super().close()

    def _leave(self, client: ServerClient) -> None:
        _, group = self._groups.pop(client.url, ("", None))
        if group is not None:
            group.abort()


def kind_of(kind: str, device: str, folder: str | None) -> str:
    """The kind that `auto` stands for, for a learner on `device`, else `kind`."""
    if kind not in KINDS:
        raise ConfigError(f"rollout.server.transfer = '{kind}': must be one of {', '.join(KINDS)}")
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
    """The transfer of `rollout.server.transfer`: file, gloo, nccl; auto is nccl for a learner on a GPU, else file.

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
    return GroupTransfer(kind, host, timeout)
