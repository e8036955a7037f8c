"""An OpenAI-compatible server on this machine for tests of `judge`: it delays, drops, limits and talks nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mm_grpo.rewards.builtins.judge import judge

Answer = Callable[["Server", dict[str, Any]], tuple[int, dict[str, str], str]]


def says(text: str, status: int = 200, **headers: str) -> tuple[int, dict[str, str], str]:
    body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(body)


class Server:
    """Answers each request with what `answer` says; None drops the connection."""

    def __init__(self) -> None:
        self.answer: Any = lambda server, body: says("Score: 10")
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections stay open until the client closes them

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(body)
                    outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                    outer.paths.append(self.path)
                answered = outer.answer(outer, body)
                if answered is None:
                    self.close_connection = True
                    return
                status, headers, text = answered
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):  # the client hung up
                    super().handle()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def keys(self) -> list[str | None]:
        return [headers.get("authorization") for headers in self.headers]

    def text(self, i: int) -> str:
        return str(self.requests[i]["messages"][0]["content"][-1]["text"])


def ask(server: Server, completion: str = "a cat", **settings: Any) -> float | None:
    settings = {"prompt": "What is it?", "answer": "cat", "url": server.url, "model": "m", **settings}
    return asyncio.run(judge(completion, **settings))


def entry(server: Server, **settings: Any) -> dict[str, Any]:
    return {"name": "judge", "url": server.url, "model": "m", **settings}
