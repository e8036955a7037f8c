"""vLLM servers over real HTTP, without a model: what they sample follows from ids, images, seed and weights alone.

Faults are attributes; `kill` and `restart` do what they say. Weights go through the receivers of `fake_servers`.
"""

from __future__ import annotations

import base64
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from PIL import Image

from helpers.fake_servers import FakeServer
from mm_grpo.rollout.served.client import ServerRefused, ServerUnreachable
from mm_grpo.rollout.served.protocol import GENERATE, INFO, NEEDED
from mm_grpo.types import EnginePrompt, Prompt, Sample

IMAGE, STOP = 7, 1
EXPANDED = 3
"""Image tokens that an image becomes."""


class Processor:
    """What the engine asks of a processor."""

    media_token_ids = frozenset({IMAGE})
    stop_token_ids = frozenset({STOP})

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def prompt_of(uid: str, text: str, *images: Image.Image) -> Prompt:
    """A prompt whose images stand before its text."""
    ids = [*[IMAGE] * len(images), *map(ord, text)]
    expanded = [t for i in ids for t in ([i] * (EXPANDED if i == IMAGE else 1))]
    return Prompt(Sample(uid, ()), tuple(expanded), EnginePrompt(tuple(ids), images), cast(Any, None), {})


class FakeVLLM:
    """One server. `asked` are the bodies of its requests, `most` the most of them at once."""

    def __init__(self, *, transfer: str = "file", delay: float = 0.0) -> None:
        self.delay = delay
        self.control = FakeServer("", transfer)
        self.asked: list[dict[str, Any]] = []
        self.most = 0
        self.cut = self.status = 0  # so many requests are cut, or answered with 500
        self.stopped = threading.Event()  # answers nothing, as a process after SIGSTOP
        self.stuck = threading.Event()  # answers /health and no request
        self.missing: tuple[str, ...] = ()
        self.max_model_len, self.key, self.raw, self.expanded = 1000, "", False, EXPANDED
        self.refuse = ""
        self.odd: dict[str, Callable[[Any], Any]] = {}  # what becomes of an answer, by path
        self.lock = threading.Lock()
        self.working: list[socket.socket] = []  # connections whose request is being sampled
        self.mute: set[socket.socket] = set()  # connections that stay open and bring nothing any more
        self.ended = threading.Event()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return self.control.versions[-1] if self.control.versions else "default"

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
        self._stop()
        self.ended.set()
        for connection in list(self.connections):
            with self.lock:
                _shut(connection)

    def vanish(self) -> None:
        """No more answers, and one connection alone is cut: as through a proxy that does not pass a reset on."""
        cut, *_ = self.working
        self.mute = self.connections - {cut}
        self._stop()
        _shut(cut)

    def _stop(self) -> None:
        self.alive = False
        self.http.shutdown()
        self.http.server_close()

    def restart(self) -> None:
        """As a new process, with the weights on disk."""
        self.control.restart()
        self.control.versions.clear()
        self.start()

    # one request -----------------------------------------------------------------------------

    def handle(self, call: BaseHTTPRequestHandler) -> None:
        self.connections.add(call.connection)
        body = call.rfile.read(int(call.headers.get("content-length") or 0))
        path, _, query = call.path.partition("?")
        while self.stopped.is_set() and self.alive:
            time.sleep(0.01)
        if self.key and call.headers.get("authorization") != f"Bearer {self.key}":
            return self.reply(call, 401, {"error": "this server wants a key"})
        sampling = path == GENERATE
        with self.lock:
            self.working += [call.connection] * sampling
            self.most = max(self.most, len(self.working))
        try:
            status, value = 200, self.answer(path, json.loads(body or "null"), query, call)
            if path in self.odd:
                value = self.odd[path](value)
        except ServerRefused as error:
            status, value = error.status, {"error": error.reason}
        except ServerUnreachable as error:
            status, value = 500, {"error": error.reason}
        except ConnectionError:
            call.close_connection = True
            return _shut(call.connection)
        finally:
            with self.lock:
                if sampling:
                    self.working.remove(call.connection)
        if call.connection in self.mute:
            self.ended.wait()
        if not self.alive or call.connection in self.mute:
            return _shut(call.connection)
        self.reply(call, status, value)

    def reply(self, call: BaseHTTPRequestHandler, status: int, value: Any) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        try:
            call.send_response(status)
            call.send_header("content-length", str(len(data)))
            call.end_headers()
            call.wfile.write(data)
        except OSError:
            call.close_connection = True

    def answer(self, path: str, body: Any, query: str, call: Any) -> Any:
        if path == "/health":
            return None
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/openapi.json":
            fields = {"content_parts": {}} if "content_parts" not in self.missing else {}
            return {
                "paths": {path: {} for path in {*NEEDED} - set(self.missing)},
                "components": {"schemas": {"GenerateRequest": {"properties": fields}}},
            }
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": self.max_model_len}]}
        if path == "/is_paused":
            return {"is_paused": self.control.paused}
        if path == INFO:
            return {"weight_version": self.name}
        if path == GENERATE:
            return self.sample(body, call)
        params = dict(pair.split("=") for pair in query.split("&") if pair)
        return self.control.call(path, body, params=params)

    def sample(self, body: dict[str, Any], call: Any) -> Any:
        probing = "allowed_token_ids" in body.get("sampling_params", {})
        if not probing:
            with self.lock:
                self.asked.append(body)
                cut, failed = self.cut > 0, self.status > 0
                self.cut -= cut
                self.status -= failed and not cut
            if cut:
                raise ConnectionError
            if failed:
                raise ServerUnreachable("", "EngineDeadError")
            if self.refuse:
                raise ServerRefused("", self.refuse, 400)
        held = self.name
        end = time.monotonic() + self.delay
        while self.alive and (self.stuck.is_set() or self.stopped.is_set() or time.monotonic() < end):
            time.sleep(0.002)
            if call.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise ConnectionError
        assert body["model"] == "tiny"
        params = body["sampling_params"]
        if "allowed_token_ids" not in params:
            assert params.get("logit_bias") == {str(IMAGE): -1e30} and body["return_token_ids"]
        pictures = [_pixels(part["url"]) for part in body.get("content_parts", ())]
        return self.completed(self.expand(body["token_ids"]), pictures, params, held)

    def expand(self, ids: Sequence[int]) -> list[int]:
        return [t for i in ids for t in ([i] * (self.expanded if i == IMAGE else 1))]

    def completed(self, ids: list[int], pictures: list[bytes], params: Mapping[str, Any], held: str) -> Any:
        choices = []
        for index in range(params.get("n", 1)):
            rng = random.Random(repr((ids, pictures, params.get("seed", 0) + index)))
            tokens = [rng.randrange(32, 127) for _ in range(params["max_tokens"])]
            logprobs = [
                0.0 if "allowed_token_ids" in params and not self.raw else -rng.random() for _ in tokens
            ]
            content = [{"token_id": t, "logprob": x} for t, x in zip(tokens, logprobs, strict=True)]
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
