"""One server's HTTP calls: what is the server's fault, what the request's, deadlines and the key."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers.patience import PATIENCE, until
from helpers.processes import refusing_port

from mm_grpo.rollout.served.client import ServerClient, ServerRefused, ServerUnreachable, ServerUnreadable


class Handler(BaseHTTPRequestHandler):
    """Answers by path, and notes what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, str | None, Any]]
    released: threading.Event
    failed = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path
        self.asked.append((self.command, path, self.headers.get("authorization"), json.loads(body or "null")))
        if path.startswith("/cut") or self.failed:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if path.startswith("/hang"):
            self.released.wait(10)
        self.failed = path == "/update_weights"  # as vLLM: the connection ends after the error, unannounced
        status = (
            500 if self.failed else int(path.rsplit("/", 1)[1].split("?")[0]) if "/status/" in path else 200
        )
        answer = {
            200: {"path": path},
            400: {"error": {"message": "the row\nis wrong"}},
            401: {"error": f"{'x' * 375}no such key: {self.headers.get('authorization')}"},
            422: {"detail": [{"loc": ["body"]}]},
        }.get(status, {"error": "x" * 900})
        odd = {"/text": b"not json", "/empty": b"", "/deep": b"[" * 100_000}
        data = odd.get(path, json.dumps(answer).encode())
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    Handler.asked, Handler.released = [], threading.Event()
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 200)
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    Handler.released.set()
    found.shutdown()
    found.server_close()


@pytest.fixture
def client(server: ThreadingHTTPServer) -> Iterator[ServerClient]:
    found = ServerClient(f"http://127.0.0.1:{server.server_port}/", key="s3cret", timeout=2 * PATIENCE)
    yield found
    found.close()


def test_a_key_that_a_server_echoes_is_in_no_message(client: ServerClient) -> None:
    with pytest.raises(ServerRefused) as raised:
        client.call("/status/401")
    assert "HTTP 401" in str(raised.value) and "s3" not in str(raised.value)


def test_an_answer_is_decoded_and_the_key_sent(client: ServerClient) -> None:
    assert client.call("/a", {"x": [1.5]}, params={"mode": "keep"}) == {"path": "/a?mode=keep"}
    assert client.call("/b", method="GET") == {"path": "/b"}
    assert client.call("/empty") is None
    assert Handler.asked == [
        ("POST", "/a?mode=keep", "Bearer s3cret", {"x": [1.5]}),
        ("GET", "/b", "Bearer s3cret", None),
        ("POST", "/empty", "Bearer s3cret", None),
    ]


def test_what_follows_the_error_of_a_worker_is_not_cut(client: ServerClient) -> None:
    for _ in range(3):
        with pytest.raises(ServerUnreachable):
            client.call("/update_weights", {})
        assert client.call("/a") == {"path": "/a"}


def test_proxies_of_the_environment_are_not_used(
    client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert client.call("/a") == {"path": "/a"}


def test_4xx_is_the_requests_fault_and_5xx_the_servers(client: ServerClient) -> None:
    with pytest.raises(
        ServerRefused, match=r"/status/400 was answered with HTTP 400: the row is wrong$"
    ) as bad:
        client.call("/status/400", {})
    assert bad.value.status == 400
    with pytest.raises(ServerRefused, match=r'HTTP 422: \[\{"loc": \["body"\]\}\]'):
        client.call("/status/422", {})
    for status in (500, 503, 429, 408):
        with pytest.raises(ServerUnreachable, match=rf"HTTP {status}: x{{400}} \.\.\.$") as error:
            client.call(f"/status/{status}", {})
        assert "s3cret" not in str(error.value)


def test_answers_are_bounded(client: ServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/text", "/deep"):
        with pytest.raises(ServerUnreadable, match=f"the answer to {path} "):
            client.call(path)
    monkeypatch.setattr("mm_grpo.rollout.served.client.LARGEST_JSON", 8)
    with pytest.raises(ServerUnreachable, match="/long was answered with more than 8 bytes"):
        client.call("/long")


def test_refused_cut_and_late(client: ServerClient) -> None:
    unreachable = r"127\.0\.0\.1:\d+: no connection \(Connection refused\)"
    with refusing_port() as port, pytest.raises(ServerUnreachable, match=unreachable):
        ServerClient(f"http://127.0.0.1:{port}", timeout=1).call("/a")
    with pytest.raises(ServerUnreachable, match=r"the connection was cut during /cut \(.+\)"):
        client.call("/cut")
    started = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"no answer to /hang within 0\.2 s"):
        client.call("/hang", timeout=0.2)
    assert time.monotonic() - started < PATIENCE  # not the time-out of its other calls


def test_a_request_that_is_given_up_ends_at_once(client: ServerClient) -> None:
    future = client.submit("/hang", lambda: {"x": 1})
    until(lambda: Handler.asked)
    assert Handler.asked[0][3] == {"x": 1}
    assert future.cancel()
    assert client.call("/a") == {"path": "/a"}


def test_closing_ends_who_waits(client: ServerClient) -> None:
    ended = threading.Event()

    def ask() -> None:
        with pytest.raises(CancelledError):
            client.call("/hang")
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    until(lambda: Handler.asked)
    client.close()
    assert ended.wait(PATIENCE)


@pytest.mark.slow
def test_the_kernel_asks_whether_the_other_end_is_there(
    client: ServerClient, server: ThreadingHTTPServer
) -> None:
    """After 30 s of silence, 3 times, 10 s apart: else a host that lost power would be waited for for ever."""
    asked = client.submit("/hang", {})
    until(lambda: Handler.asked)
    (ours,) = [s for s in gc.get_objects() if isinstance(s, socket.socket) and _peer(s) == server.server_port]
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert [ours.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3]
    asked.cancel()


def _peer(connection: socket.socket) -> int | None:
    """The port at the other end of a TCP connection."""
    try:
        return int(connection.getpeername()[1]) if connection.family == socket.AF_INET else None
    except OSError:  # closed, or it listens
        return None


def test_many_at_once_each_with_its_own_answer(client: ServerClient) -> None:
    futures = [client.submit(f"/{i}", {"i": i}) for i in range(100)]
    assert [f.result(PATIENCE)["path"] for f in futures] == [f"/{i}" for i in range(100)]
    assert sorted(body["i"] for *_, body in Handler.asked) == list(range(100))


def test_a_unix_socket(tmp_path: Any) -> None:
    path = tmp_path / "s.sock"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def answer() -> None:
        connection, _ = listening.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]")
        connection.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    client = ServerClient(f"unix://{path}", timeout=5)
    assert client.call("/a") == []
    client.close()
    thread.join(5)
    listening.close()
