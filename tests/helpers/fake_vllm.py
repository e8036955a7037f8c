"""vLLM servers over real HTTP, without a model: what they sample follows from ids, images, seed and weights alone.

`FakeVLLM` speaks the dialect of 0.32, or with `old` that of 0.25.1. Faults are attributes; `kill` and `restart` do what
they say. Weights go through the receivers of `fake_servers`.
"""

from __future__ import annotations

import base64
import hashlib
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
from mm_grpo.rollout.served.dialect import CHAT, CONTROL, GENERATE, INFO, RENDER, RPC
from mm_grpo.types import EnginePrompt, Prompt, Sample

IMAGE, STOP = 7, 1
NAMES = {IMAGE: "<img>", STOP: "<end>"}
EXPANDED = 3
"""Image tokens that an image becomes."""


class Tokenizer:
    """A token is a character, and those of NAMES their names."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(NAMES.get(i, chr(i)) for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return NAMES[token]

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        for token, name in NAMES.items():
            text = text.replace(name, chr(token))
        return {"input_ids": [ord(c) for c in text]}


class Processor:
    """What the engine asks of a processor."""

    media_token_ids = frozenset({IMAGE})
    stop_token_ids = frozenset({STOP})
    tokenizer = Tokenizer()

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


def prompt_of(uid: str, text: str, *images: Image.Image) -> Prompt:
    """A prompt whose images stand before its text."""
    ids = [*[IMAGE] * len(images), *map(ord, text)]
    expanded = [t for i in ids for t in ([i] * (EXPANDED if i == IMAGE else 1))]
    return Prompt(Sample(uid, ()), tuple(expanded), EnginePrompt(tuple(ids), images), cast(Any, None), {})


class FakeVLLM:
    """One server. `asked` are the bodies of its requests, `most` the most of them at once."""

    def __init__(self, *, old: bool = False, transfer: str = "file", delay: float = 0.0) -> None:
        self.old, self.delay = old, delay
        self.control = FakeServer("", transfer)
        self.asked: list[tuple[str, dict[str, Any]]] = []
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
        sampling = path in (GENERATE, CHAT)
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
            return {"version": "0.25.1" if self.old else "0.32.0"}
        if path == "/openapi.json":
            paths = {*CONTROL, GENERATE, CHAT, RENDER, *(() if self.old else (INFO,))} - set(self.missing)
            fields: dict[str, Any] = {"priority": {}} if self.old else {"content_parts": {}, "priority": {}}
            return {
                "paths": {path: {} for path in paths},
                "components": {"schemas": {"GenerateRequest": {"properties": fields}}},
            }
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": self.max_model_len}]}
        if path == "/is_paused":
            return {"is_paused": self.control.paused}
        if path == INFO and not self.old:
            return {"weight_version": self.name}
        if path == RPC and body == {"method": "mm_grpo_weights_name"}:
            accounts = [w.account for w in self.control.workers]
            return {"results": [a.weights_name if a.finished and a.weights_name else None for a in accounts]}
        if path in (GENERATE, CHAT, RENDER):
            return self.sample(path, body, call)
        params = dict(pair.split("=") for pair in query.split("&") if pair)
        return self.control.call(path, body, params=params)

    def sample(self, path: str, body: dict[str, Any], call: Any) -> Any:
        probing = "allowed_token_ids" in body.get("sampling_params", {})
        if not probing:
            with self.lock:
                self.asked.append((path, body))
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
        if path == GENERATE:
            return self.generated(body, held)
        ids, pictures = self.chat_prompt(body)
        if path == RENDER:
            places, at = [], 0
            for token in ids:
                if token == IMAGE:
                    places.append({"offset": at, "length": self.expanded})
                at += self.expanded if token == IMAGE else 1
            hashes = {"image": [_hash(p) for p in pictures]}
            features = {
                "mm_hashes": hashes,
                "mm_placeholders": {"image": places},
                "kwargs_data": {"image": hashes},
            }
            return {"token_ids": self.expand(ids), "features": features}
        assert body["return_token_ids"] and body["logprobs"] and body["top_logprobs"] == 0
        params = {**body, "max_tokens": body["max_completion_tokens"], "logprobs": 0}
        assert body["bad_words"] == ["<img>"]
        return self.completed(self.expand(ids), pictures, params, held)

    def chat_prompt(self, body: dict[str, Any]) -> tuple[list[int], list[bytes]]:
        assert "part['text']" in body["chat_template"]
        (message,) = body["messages"]
        pictures = [_pixels(p["image_url"]["url"]) for p in message["content"] if p["type"] == "image_url"]
        (text,) = [p["text"] for p in message["content"] if p["type"] == "text"]
        return Tokenizer()(text)["input_ids"], pictures

    def generated(self, body: dict[str, Any], held: str) -> Any:
        params = body["sampling_params"]
        if self.old:
            assert "content_parts" not in body and "return_token_ids" not in body
            pictures = [
                h.encode() for h in (body.get("features") or {}).get("mm_hashes", {}).get("image", ())
            ]
            if pictures:
                for place in body["features"]["mm_placeholders"]["image"]:
                    run = body["token_ids"][place["offset"] : place["offset"] + place["length"]]
                    assert run == [IMAGE] * self.expanded
            ids = body["token_ids"]
        else:
            pictures = [_pixels(part["url"]) for part in body.get("content_parts", ())]
            ids = self.expand(body["token_ids"])
        if "allowed_token_ids" not in params:
            assert params.get("logit_bias") == {str(IMAGE): -1e30}
        return self.completed(ids, [_hash(p).encode() if not self.old else p for p in pictures], params, held)

    def expand(self, ids: Sequence[int]) -> list[int]:
        return [t for i in ids for t in ([i] * (self.expanded if i == IMAGE else 1))]

    def completed(self, ids: list[int], pictures: list[bytes], params: Mapping[str, Any], held: str) -> Any:
        choices = []
        for index in range(params.get("n", 1)):
            key = repr(
                (
                    ids,
                    [_hash(p) if len(p) != 64 else p.decode() for p in pictures],
                    params.get("seed", 0) + index,
                )
            )
            rng = random.Random(key)
            tokens = [rng.randrange(32, 127) for _ in range(params["max_tokens"])]
            logprobs = [
                0.0 if "allowed_token_ids" in params and not self.raw else -rng.random() for _ in tokens
            ]
            content = [{"token_id": t, "logprob": x} for t, x in zip(tokens, logprobs, strict=True)]
            choice: dict[str, Any] = {"index": index, "token_ids": tokens, "finish_reason": "length"}
            choice["logprobs"] = {"content": content} if params.get("logprobs") is not None else None
            if not self.old:
                choice["weight_versions"] = [{"version": held, "start": 0, "end": len(tokens)}]
            choices.append(choice)
        body: dict[str, Any] = {"choices": choices[::-1]}
        if not self.old or "bad_words" in params:
            body["prompt_token_ids"] = ids
        if "prompt_logprobs" in params:
            entries = [{str(token): {"logprob": -token / 1000, "rank": 1}} for token in ids[1:]]
            body["prompt_logprobs"] = [None, *entries]
        return body


def _pixels(url: str) -> bytes:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data))).tobytes()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
