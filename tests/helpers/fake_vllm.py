"""A vLLM server over real HTTP, without a model: what it samples follows from ids, images, seed and weights alone.

Its workers are our receivers over a dict, and it knows vLLM's rules (an update begins once; one that fails is over).
Faults are attributes; `faults` and `odd` are functions by endpoint, which run in place of it or change its answer.
"""

from __future__ import annotations

import base64
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs

import torch
from PIL import Image
from torch import Tensor

from helpers import tiny
from helpers.patience import PATIENCE, until
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.served import protocol
from mm_grpo.rollout.served.client import ServerClient
from mm_grpo.rollout.served.engine import ServedEngine
from mm_grpo.rollout.served.plugin import RECEIVERS, Account
from mm_grpo.rollout.served.protocol import ENDPOINTS, GENERATE, INFO, RPC, SLEEP, ServerLimits
from mm_grpo.rollout.served.transfer import ServedTransfer, transfer_of
from mm_grpo.rollout.vllm import adapters
from mm_grpo.rollout.weights import digest
from mm_grpo.types import Completion, EnginePrompt, Prompt, Sample

IMAGE, STOP = 7, 1
EXPANDED = 3
"""Image tokens that an image becomes."""
FIVE = Sampling(max_tokens=5)
WEIGHTS = {
    "a.q.weight": torch.arange(6.0).view(2, 3),
    "a.k.weight": torch.ones(2),
    "b.weight": torch.zeros(4),
}
Made = Callable[..., tuple[ServedEngine, "list[FakeVLLM]"]]
Change = Callable[[Any], Any]


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


class LedgerEngine:
    """What a weight ledger sends to; every server has to receive the same."""

    holds_weights = True

    def __init__(self, transfer: ServedTransfer, clients: Sequence[ServerClient]) -> None:
        self.transfer, self.clients = transfer, clients

    def update_weights(self, tensors: Any, version: int) -> Any:
        first, *others = self.transfer.send(self.clients, tensors, version).values()
        for value in (first, *others):
            if isinstance(value, Exception):
                raise value
        assert all(other == first for other in others)
        return first


class Processor:
    """What the engine asks of a processor."""

    media_token_ids = frozenset({IMAGE})
    stop_token_ids = frozenset({STOP})

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Status(Exception):
    """A request is answered with this status, and an error in JSON or these bytes."""

    def __init__(self, code: int, error: Any) -> None:
        super().__init__(code, error)
        self.code = code
        self.value = error if isinstance(error, bytes) else {"error": error}


class FakeModel:
    """Keeps what `load_weights` brings, once `finalize` has run."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.waiting: dict[str, Tensor] = {}
        self.adapter: dict[str, Tensor] = {}

    def finalize(self) -> None:
        """Take what came; an adapter is dropped by that."""
        self.weights |= self.waiting
        self.waiting, self.adapter = {}, {}

    def named_parameters(self, remove_duplicate: bool = False) -> Iterable[tuple[str, Tensor]]:
        return self.weights.items()

    def named_modules(self) -> list[tuple[str, None]]:
        return [(name.rpartition(".")[0], None) for name in self.weights]

    def get_submodule(self, name: str) -> None:
        return None

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.waiting[name] = tensor.clone()


def fake_adapters(monkeypatch: Any) -> None:
    """Let a FakeModel keep factors as its adapter."""

    def put(model: Any, factors: Mapping[str, Tensor]) -> None:
        model.adapter = {name: factor.clone() for name, factor in factors.items()}

    def read_back(model: Any, factors: Mapping[str, Tensor]) -> dict[str, str]:
        return {name: digest(model.adapter[name]) for name in factors}

    monkeypatch.setattr(adapters, "put", put)
    monkeypatch.setattr(adapters, "read_back", read_back)
    monkeypatch.setattr(adapters, "request", lambda: adapters.NAME)


class FakeWorker:
    """vLLM's part of its worker number `rank` of `world`, before a receiver (`worker`)."""

    start_weight_update: Callable[[], None]
    finish_weight_update: Callable[[], None]
    receive_weights: Callable[[Any], None]
    update_info_cls: Any

    def __init__(self, rank: int, world: int) -> None:
        self.model, self.model_config, self.vllm_config = FakeModel(), None, None
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=world, rank=rank)
        self.device = torch.device("cpu")
        self.account = Account(logprobs_mode="processed_logprobs", sleep_mode=True)
        self.active = False

    def _initialize(self) -> None:
        assert not self.model.waiting, "layers still wait for tensors of an update that was given up"

    def _discard(self) -> None:
        self.model.waiting = {}

    def _finalize(self) -> None:
        self.model.finalize()

    def start(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.start_weight_update()
        self.active = True

    def update(self, info: Mapping[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.receive_weights(self.update_info_cls(**info))
        except BaseException:
            self.active = False
            raise

    def finish(self) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.finish_weight_update()
        self.active = False


def worker(kind: str, rank: int, world: int) -> Any:
    """A worker with a receiver of `kind`."""
    return type("Worker", (FakeWorker, RECEIVERS[kind]), {})(rank, world)


class FakeVLLM:
    """One server. `calls` are the endpoints that were asked, `asked` the bodies of requests, `most` the most of them at
    once; `client` is one to it."""

    def __init__(self, transfer: str = "file", workers: int = 1) -> None:
        self.kind, self.count = transfer, workers
        self.calls: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.caches: list[str] = []
        self.most, self.delay = 0, 0.0
        self.cut = self.status = 0  # so many requests are cut, or answered with 500
        self.stuck = threading.Event()  # answers /health and no request
        self.missing: tuple[str, ...] = ()
        self.lora: tuple[set[str], int] | None = None  # layers that take adapters, and of which rank at most
        self.max_model_len, self.key, self.expanded = 1000, "", EXPANDED
        self.refuse, self.old = "", False
        self.faults: dict[str, Change] = {}  # in place of an endpoint, or before it where it gives None
        self.odd: dict[str, Change] = {}  # what becomes of an answer, by path
        self.lock = threading.Lock()
        self.working: list[socket.socket] = []  # connections whose request is being sampled
        self.last: tuple[Any, ...] = ()  # method, path, key and body of the last call
        self.port = 0
        self.lose_weights()
        self.start()
        self.client = ServerClient(self.url, timeout=2 * PATIENCE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return self.versions[-1] if self.versions else "default"

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.workers[0].model.weights)

    def start(self) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                owner.handle(self)

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Listening(ThreadingHTTPServer):
            request_queue_size = 200

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self.http = Listening(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_port
        self.alive = True
        self.connections: set[socket.socket] = set()
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """No more answers, connections cut."""
        if self.alive:
            self.alive = False
            self.http.shutdown()
            self.http.server_close()
        for connection in list(self.connections):
            with self.lock:
                _shut(connection)

    def restart(self) -> None:
        """As a new process, with the weights on disk."""
        self.lose_weights()
        self.start()

    def lose_weights(self) -> None:
        """New workers, with no weights, in no group."""
        self.workers = [worker(self.kind, rank, self.count) for rank in range(self.count)]
        self.versions: list[str] = []
        self.paused, self.asleep = False, set[str]()

    # one request -----------------------------------------------------------------------------

    def handle(self, call: BaseHTTPRequestHandler) -> None:
        self.connections.add(call.connection)
        body = json.loads(call.rfile.read(int(call.headers.get("content-length") or 0)) or "null")
        path, _, query = call.path.partition("?")
        if self.key and call.headers.get("authorization") != f"Bearer {self.key}":
            return self.reply(call, 401, {"error": "this server wants a key"})
        sampling = path == GENERATE
        with self.lock:
            self.calls.append(f"{path}?{query}" if path in SLEEP and query else path)
            self.last = (call.command, call.path, call.headers.get("authorization"), body)
            self.working += [call.connection] * sampling
            self.most = max(self.most, len(self.working))
        try:
            status, value = 200, self.answer(path, body, query, call)
        except Status as error:
            status, value = error.code, error.value
        except ConnectionError:
            call.close_connection = True
            return _shut(call.connection)
        except Exception as error:
            status, value = 500, {"error": str(error)}
        finally:
            with self.lock:
                if sampling:
                    self.working.remove(call.connection)
        if not self.alive:
            return _shut(call.connection)
        self.reply(call, status, value)

    def reply(self, call: BaseHTTPRequestHandler, status: int, value: Any) -> None:
        data = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        try:
            call.send_response(status)
            call.send_header("content-length", str(len(data)))
            call.end_headers()
            call.wfile.write(data)
        except OSError:
            call.close_connection = True

    def answer(self, path: str, body: Any, query: str, call: Any) -> Any:
        value = self.faults[path](body) if path in self.faults else None
        if value is None:
            value = self.sample(body, call) if path == GENERATE else self.control(path, body, query)
        return self.odd[path](value) if path in self.odd else value

    def control(self, path: str, body: Any, query: str) -> Any:
        fixed = {
            "/health": None,
            "/openapi.json": {"paths": {key: {} for key in {*ENDPOINTS, *SLEEP} - {*self.missing}}},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": self.max_model_len}]},
            "/get_world_size": {"world_size": self.count},
            INFO: {"weight_version": self.name},
            "/is_sleeping": {"is_sleeping": self.paused or bool(self.asleep)},
        }
        if path in fixed:
            return fixed[path]
        if path == RPC:
            return {"results": self.called(body)}
        if path in ("/sleep", "/wake_up"):
            return self.sleep_or_wake(path, parse_qs(query))
        memory = "kv_cache" if path == "/resume" else "weights" if "weight" in path else ""
        assert memory not in self.asleep, f"CUDA error: illegal memory access in {path}"
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/init_weight_transfer_engine":
            self._on_workers(lambda w: w.init_transfer_engine(w.init_info_cls(**body["init_info"])))
        elif path == "/start_weight_update":
            self._on_workers(lambda w: w.start())
        elif path == "/update_weights":
            self._on_workers(lambda w: w.update(body["update_info"]))
        elif path == "/finish_weight_update":
            self._on_workers(lambda w: w.finish())
        elif path == "/update_weight_version":
            self.versions.append(body["new_version"])
        elif path == "/reset_prefix_cache":
            assert query == "reset_running_requests=true"
            self.caches.append("prefix")
            return {"success": True}
        elif path == "/reset_encoder_cache":
            self.caches.append("encoder")
        else:
            raise Status(404, f"there is no {path}")
        return None

    def sleep_or_wake(self, path: str, query: Mapping[str, list[str]]) -> Any:
        """As the engine of vLLM 0.32; the `old` one schedules from any wake on, and answers nothing."""
        if path == "/sleep":
            self.paused = True
            for each in self.workers if query["level"] == ["2"] and not self.asleep else ():
                each.model.weights, each.model.adapter = {}, {}
            self.asleep = {"weights", "kv_cache"}
        elif (tags := {*query.get("tags", self.asleep)}) <= self.asleep:
            self.asleep -= tags
        self.paused &= path == "/sleep" or (bool(self.asleep) and not self.old)
        return None if self.old else {"status": "sleeping" if self.asleep else "awake"}

    def called(self, body: Any) -> list[Any]:
        """The answers of all workers to a method of their extension."""
        if body["method"] == protocol.ADAPTER_LAYERS:
            layers, rank = json.loads(body["args"][0])
            own, most = self.lora or (set(), 0)
            return [sorted(own & set(layers)) if rank <= most else [] for _ in self.workers]
        assert body == {"method": "mm_grpo_received"}
        for each in self.workers:
            each.account.put_factors(each.model)
        return [each.account.model_dump() for each in self.workers]

    def _on_workers(self, work: Callable[[Any], None]) -> None:
        """All at once, as the processes of a tensor-parallel group."""
        errors: list[Exception] = []

        def one(each: Any) -> None:
            try:
                work(each)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(each,)) for each in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def sample(self, body: dict[str, Any], call: Any) -> Any:
        params = body["sampling_params"]
        with self.lock:
            self.asked.append(body)
            cut, failed = self.cut > 0, self.status > 0
            self.cut -= cut
            self.status -= failed and not cut
        if cut:
            raise ConnectionError
        if failed:
            raise RuntimeError("EngineDeadError")
        if self.refuse:
            raise Status(400, self.refuse)
        assert "prompt_logprobs" in params or params["logit_bias"] == {str(IMAGE): -1e30}
        held = self.name
        end = time.monotonic() + self.delay
        while self.alive and (self.stuck.is_set() or time.monotonic() < end):
            time.sleep(0.002)
            if call.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise ConnectionError
        assert not self.asleep and (body["model"] == "tiny" or (body["model"] == "policy" and self.lora))
        pictures = [_pixels(part["url"]) for part in body.get("content_parts", ())]
        ids = [t for i in body["token_ids"] for t in ([i] * (self.expanded if i == IMAGE else 1))]
        return self.completed(ids, pictures, params, held)

    def completed(self, ids: list[int], pictures: list[bytes], params: Mapping[str, Any], held: str) -> Any:
        choices = []
        for index in range(params.get("n", 1)):
            rng = random.Random(repr((ids, pictures, params.get("seed", 0) + index)))
            tokens = [rng.randrange(32, 127) for _ in range(params["max_tokens"])]
            content = [{"token_id": t, "logprob": -rng.random()} for t in tokens]
            choice: dict[str, Any] = {"index": index, "token_ids": tokens, "finish_reason": "length"}
            choice["logprobs"] = {"content": content} if params.get("logprobs") is not None else None
            choice["weight_versions"] = [{"version": held, "start": 0, "end": len(tokens)}]
            choices.append(choice)
        body: dict[str, Any] = {"choices": choices[::-1], "prompt_token_ids": ids}
        if "prompt_logprobs" in params:
            entries = [{str(token): {"logprob": -token / 1000, "rank": 1}} for token in ids[1:]]
            body["prompt_logprobs"] = [None, *entries]
        return body


def _pixels(url: str) -> bytes:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data))).tobytes()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# engines over such servers -------------------------------------------------------------------


def engine_over(
    held: ExitStack,
    count: int = 2,
    *,
    send: bool = True,
    transfer: Any = None,
    servers: Any = None,
    key: str = "",
    **limits: Any,
) -> tuple[ServedEngine, list[FakeVLLM]]:
    """An engine over fakes that hold WEIGHTS as version 0, unless `send` is false; `held` closes it."""
    fakes: list[FakeVLLM] = servers or [FakeVLLM() for _ in range(count)]
    for fake in fakes:
        held.callback(fake.kill)
    engine = engine_of(fakes, transfer or transfer_of("file", timeout=5.0), key, **limits)
    held.callback(engine.close)
    if send:
        engine.update_weights(WEIGHTS.items(), 0)
        if all(fake.alive for fake in fakes):
            back(engine)  # one that was too slow to be there at the start
    return engine, fakes


def engine_of(
    fakes: Sequence[FakeVLLM], transfer: Any, key: str = "", ranks: Any = None, **limits: Any
) -> ServedEngine:
    given = {"probe_timeout": 1.0, "wait_timeout": 60.0, "max_model_len": 100, **limits}
    return ServedEngine(
        [ServerClient(fake.url, key=key, timeout=5) for fake in fakes],
        transfer,
        Processor(),  # type: ignore[arg-type]
        limits=ServerLimits(**given),
        max_media={"image": 2, "video": 1},
        ranks=ranks,
    )


def prompt_of(uid: str, text: str, *images: Image.Image) -> Prompt:
    """A prompt whose images stand before its text."""
    ids = [*[IMAGE] * len(images), *map(ord, text)]
    expanded = [t for i in ids for t in ([i] * (EXPANDED if i == IMAGE else 1))]
    return Prompt(Sample(uid, ()), tuple(expanded), EnginePrompt(tuple(ids), images), cast(Any, None), {})


def requests(prompts: int = 12, each: int = 4, first: int = 0) -> list[Request]:
    made = [prompt_of(f"row-{i}", f"say {i}", tiny.picture(i % 5, 8, 8)) for i in range(prompts)]
    return requests_for(made, [range(first + 100 * i, first + 100 * i + each) for i in range(prompts)], FIVE)


def in_midst(engine: ServedEngine, fakes: list[FakeVLLM], fault: Callable[[], None]) -> list[Completion]:
    """The completions of a step, in which a fault comes when servers are at work."""
    for fake in fakes:
        fake.delay = 0.1
    begun = len(fakes[0].asked)

    def later() -> None:
        until(lambda: len(fakes[0].asked) > begun)
        fault()

    thread = threading.Thread(target=later)
    thread.start()
    try:
        return engine.generate(requests())
    finally:
        thread.join()


def back(engine: ServedEngine) -> None:
    until(lambda: len(engine.pool.ready()) == len(engine.pool.servers), engine.pool.describe())


def cut(fake: FakeVLLM) -> None:
    fake.cut = 2


def fail(fake: FakeVLLM) -> None:
    fake.status = 2


def restart(fake: FakeVLLM) -> None:
    fake.kill()
    fake.restart()
