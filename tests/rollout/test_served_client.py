"""One server's HTTP calls: what is the server's fault, what the request's, deadlines and the key."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.fake_vllm import FakeVLLM, Status
from helpers.patience import PATIENCE, until
from helpers.processes import refusing_port

from mm_grpo.rollout.served.client import ServerClient, ServerRefused, ServerUnreachable

pytestmark = pytest.mark.lowest


@pytest.fixture
def server(held: ExitStack) -> FakeVLLM:
    fake = FakeVLLM()
    held.callback(fake.kill)
    fake.key = "s3cret"
    fake.faults["/a"] = lambda body: {"it": body}
    return fake


@pytest.fixture
def client(server: FakeVLLM) -> Iterator[ServerClient]:
    found = ServerClient(server.url + "/", key="s3cret", timeout=2 * PATIENCE)
    yield found
    found.close()


def answer(code: int, body: Any) -> Any:
    """A fault that is this answer."""

    def fault(_: Any) -> None:
        raise Status(code, body)

    return fault


@pytest.fixture
def hangs(server: FakeVLLM) -> Iterator[None]:
    released = threading.Event()
    server.faults["/hang"] = lambda body: released.wait(10) and None
    yield
    released.set()


def test_a_key_that_a_server_echoes_is_in_no_message(server: FakeVLLM, client: ServerClient) -> None:
    server.faults["/b"] = answer(401, f"{'x' * 375}no such key: Bearer s3cret")
    with pytest.raises(ServerRefused) as raised:
        client.call("/b")
    assert "HTTP 401" in str(raised.value) and "s3" not in str(raised.value)


def test_an_answer_is_decoded_and_the_key_sent(server: FakeVLLM, client: ServerClient) -> None:
    assert client.call("/a", {"x": [1.5]}, params={"mode": "keep"}) == {"it": {"x": [1.5]}}
    assert server.last == ("POST", "/a?mode=keep", "Bearer s3cret", {"x": [1.5]})
    assert client.call("/health", method="GET") is None
    assert server.last == ("GET", "/health", "Bearer s3cret", None)


def test_proxies_of_the_environment_are_unused(client: ServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert client.call("/a", 1) == {"it": 1}


def test_4xx_is_the_requests_fault_and_5xx_the_servers(server: FakeVLLM, client: ServerClient) -> None:
    for code, body, shown in (
        (400, b'{"error": {"message": "the row\\nis wrong"}}', "HTTP 400: the row is wrong"),
        (422, b'{"detail": [{"loc": ["body"]}]}', 'HTTP 422: [{"loc": ["body"]}]'),
    ):
        server.faults["/b"] = answer(code, body)
        with pytest.raises(ServerRefused) as bad:
            client.call("/b", {})
        assert bad.value.status == code and str(bad.value).endswith(shown)
    for code in (500, 503, 429, 408):
        server.faults["/b"] = answer(code, "x" * 900)
        with pytest.raises(ServerUnreachable, match=rf"HTTP {code}: x{{400}} \.\.\.$"):
            client.call("/b", {})


def test_an_answer_that_is_no_json_is_the_servers_fault(server: FakeVLLM, client: ServerClient) -> None:
    server.faults["/b"] = answer(200, b"<html>")
    with pytest.raises(ServerUnreachable, match="the answer to /b "):
        client.call("/b")


@pytest.mark.usefixtures("hangs")
def test_refused_cut_and_late(server: FakeVLLM, client: ServerClient) -> None:
    unreachable = r"127\.0\.0\.1:\d+: no connection \(Connection refused\)"
    with refusing_port() as port, pytest.raises(ServerUnreachable, match=unreachable):
        ServerClient(f"http://127.0.0.1:{port}", timeout=1).call("/a")

    def cut(body: Any) -> None:
        raise ConnectionError

    server.faults["/cut"] = cut
    with pytest.raises(ServerUnreachable, match=r"the connection was cut during /cut \(.+\)"):
        client.call("/cut")
    started = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"no answer to /hang within 0\.2 s"):
        client.call("/hang", timeout=0.2)
    assert time.monotonic() - started < PATIENCE  # not the time-out of its other calls


@pytest.mark.usefixtures("hangs")
def test_closing_ends_who_waits(server: FakeVLLM, client: ServerClient) -> None:
    ended = threading.Event()

    def ask() -> None:
        with pytest.raises(CancelledError):
            client.call("/hang")
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    until(lambda: "/hang" in server.calls)
    client.close()
    assert ended.wait(PATIENCE)
