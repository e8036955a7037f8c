"""The key in front of a server: what is let through, and what of it can be seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.served.server_key import RequireKey

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


def ask(headers: list[tuple[bytes, bytes]], kind: str = "http") -> tuple[App, list[MutableMapping[str, Any]]]:
    app, sent = App(), []
    guarded = RequireKey(app, {"MM_GRPO_SERVER_KEY": KEY})
    left = iter((True, False))

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"x" * 1000, "more_body": next(left)}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "path": "/pause", "method": "POST", "headers": headers}
    asyncio.run(guarded(scope, receive, send))
    return app, sent


RIGHT = (b"authorization", f"Bearer {KEY}".encode())


def test_the_key_is_let_through() -> None:
    app, sent = ask([RIGHT])
    assert app.calls == 1 and app.received == 2000 and sent[0]["status"] == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", RIGHT[1] + b"x")],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"x-authorization", RIGHT[1])],
        [(b"authorization", b"Bearer wrong"), RIGHT],
        [(b"authorization", b"Bearer \xff\xfe")],
    ],
)
def test_anything_but_the_key_is_refused_and_not_shown(headers: list[tuple[bytes, bytes]]) -> None:
    app, sent = ask(headers)
    assert app.calls == 0 and app.received == 0  # the body is not read either
    assert sent[0]["status"] == 401 and "wants a key" in json.loads(sent[1]["body"])["error"]
    assert KEY not in str(sent)


def test_a_websocket_is_closed_and_the_start_of_the_server_let_through() -> None:
    app, sent = ask([], kind="websocket")
    assert app.calls == 0 and sent == [{"type": "websocket.close", "code": 1008}]
    app, _ = ask([], kind="lifespan")
    assert app.calls == 1


@pytest.mark.parametrize("environment", [{}, {"MM_GRPO_SERVER_KEY": ""}])
def test_without_a_key_it_does_not_start(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="MM_GRPO_SERVER_KEY"):
        RequireKey(App(), environment)
