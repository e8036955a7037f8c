"""The key in front of a server: what is let through, and what of it can be seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.served import server_key
from mm_grpo.rollout.served.server_key import RequireKey, kept_key, key_for

KEY = "a-key of some kind/+="


class App:
    """Answers 200, and counts the bytes of the body as they come."""

    def __init__(self) -> None:
        self.calls, self.received = 0, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        more = scope["type"] == "http"
        while more:
            message = await receive()
            self.received += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})


def ask(
    headers: list[tuple[bytes, bytes]],
    path: str = "/pause",
    kind: str = "http",
    chunks: int = 1,
    environment: dict[str, str] | None = None,
) -> tuple[App, list[MutableMapping[str, Any]]]:
    app, sent = App(), []
    guarded = RequireKey(app, environment or {"MM_GRPO_SERVER_KEY": KEY})
    left = iter(range(chunks - 1, -1, -1))

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"x" * 1000, "more_body": next(left) > 0}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "method": "POST", "headers": headers}
    asyncio.run(guarded(scope, receive, send))
    return app, sent


RIGHT = (b"authorization", f"Bearer {KEY}".encode())


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/health", "/metrics", "/openapi.json", "/"])
def test_every_path_wants_the_key(path: str) -> None:
    app, sent = ask([], path)
    assert app.calls == 0 and app.received == 0  # the body is not read either
    assert sent[0]["status"] == 401 and "wants a key" in json.loads(sent[1]["body"])["error"]
    known = path in ("/pause", "/update_weights", "/health", "/openapi.json")
    app, sent = ask([RIGHT], path, chunks=50)
    assert (
        app.calls == known and app.received == 50_000 * known and sent[0]["status"] == (200 if known else 404)
    )
    app, sent = ask([], path, environment={"MM_GRPO_SERVER_OPEN": "1"})  # on a Unix socket
    assert app.calls == known and sent[0]["status"] == (200 if known else 404)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer a-key")],
        [(b"authorization", RIGHT[1] + b"x")],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", KEY.encode())],
        [(b"x-authorization", RIGHT[1])],
        [(b"authorization", b"Bearer wrong"), RIGHT],
        [(b"authorization", b"Bearer \xff\xfe")],
    ],
)
def test_anything_but_the_key_is_refused_and_not_shown(headers: list[tuple[bytes, bytes]]) -> None:
    app, sent = ask(headers)
    assert app.calls == 0 and sent[0]["status"] == 401
    assert KEY not in str(sent)


def test_a_websocket_is_closed_and_the_start_of_the_server_let_through() -> None:
    app, sent = ask([], kind="websocket")
    assert app.calls == 0 and sent == [{"type": "websocket.close", "code": 1008}]
    app, _ = ask([], kind="lifespan")
    assert app.calls == 1


def test_without_a_key_it_does_not_start() -> None:
    with pytest.raises(ConfigError, match="MM_GRPO_SERVER_KEY"):
        RequireKey(App(), {})
    with pytest.raises(ConfigError, match="MM_GRPO_SERVER_KEY"):
        RequireKey(App(), {"MM_GRPO_SERVER_KEY": ""})


def test_a_key_that_nobody_set_is_found_by_its_user_until_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MM_GRPO_SERVER_KEY", raising=False)
    server_key.key_file(8000).parent.mkdir(parents=True)
    server_key.key_file(8000).symlink_to(tmp_path / "theirs")
    with kept_key(8000) as key, kept_key(8001) as other:
        assert len(key) == 64 and key != other
        file = server_key.key_file(8000)
        assert file.stat().st_mode & 0o777 == 0o600 and not (tmp_path / "theirs").exists()
        for host in ("127.0.0.1", "localhost", "[::1]"):
            assert key_for(f"http://{host}:8000") == key
        for url in (
            "http://10.0.0.7:8000",
            "unix:///127.0.0.1:8000",
            "http://127.0.0.1",
            "http://127.0.0.1:8002",
        ):
            assert key_for(url) is None
        monkeypatch.setenv("MM_GRPO_SERVER_KEY", "set")
        assert key_for("http://127.0.0.1:8000") == "set"
    assert not list((tmp_path / "state" / "mm_grpo").iterdir())
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match=r"port 8000 .*XDG_STATE_HOME"), kept_key(8000):
        pass
