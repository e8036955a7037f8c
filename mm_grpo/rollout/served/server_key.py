"""Middleware of a vLLM server at a port: every endpoint requires the key in MM_GRPO_SERVER_KEY.

vLLM's own `--api-key` guards only /v1, /v2 and /inference. Weights, pauses and calls of the workers stay open, with
which files can be written and code be run. `RequireKey` runs inside the server, as its outermost middleware. The key is
read from the environment, stands in no command, message or log, and is compared in constant time. It encrypts nothing:
on a shared network tunnel the connection, or give the server a certificate.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from mm_grpo.errors import ConfigError

VARIABLE = "MM_GRPO_SERVER_KEY"
MIDDLEWARE = "mm_grpo.rollout.served.server_key.RequireKey"
REFUSAL = b'{"error": "this server wants a key: Authorization: Bearer KEY"}'

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware that answers 401 without the key for any path and method, and closes a WebSocket."""

    def __init__(self, app: App, environment: Mapping[str, str] = os.environ) -> None:
        key = environment.get(VARIABLE)
        if not key:
            raise ConfigError(f"{MIDDLEWARE}: the environment variable {VARIABLE} holds no key; set it")
        self.app, self._expected = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(REFUSAL)).encode()),
                (b"www-authenticate", b"Bearer"),
                (b"connection", b"close"),  # the body is not read
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _allowed(self, scope: Scope) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._expected)
