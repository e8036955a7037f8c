"""Middleware of a vLLM server at a port: every endpoint wants a key.

vLLM's own `--api-key` guards /v1, /v2 and /inference alone; weights, pauses and calls of the workers stay open, and
with them files can be written and code be run. `RequireKey` runs inside the server, as its outermost middleware
(`--middleware mm_grpo.rollout.served.server_key.RequireKey`), so there is no second process that bodies pass through,
and no port behind it. The key is read from the environment, stands in no command, no message and no log, and is
compared in constant time. A connection is not encrypted by it: across hosts that others use too, tunnel it, or give the
server a certificate.

A server at a port of 127.0.0.1, which every user of the machine reaches, has a key where nobody set one: `kept_key`
makes it, in a file that its user alone can read, and `key_for` finds it there.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mm_grpo.errors import ConfigError
from mm_grpo.files import expand_home, read_regular_file

VARIABLE = "MM_GRPO_SERVER_KEY"
MIDDLEWARE = "mm_grpo.rollout.served.server_key.RequireKey"
REFUSAL = b'{"error": "this server wants a key: Authorization: Bearer KEY"}'

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 without the key, whatever the path and the method; a WebSocket is closed."""

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
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._expected)


# keys that nobody set ------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """True when an address is reached from this machine alone."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def key_file(port: int) -> Path:
    """Return the file with the key of the server at a port of this machine."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(expand_home(state), "mm_grpo", f"server-{socket.gethostname()}-{port}.key")


@contextmanager
def kept_key(port: int) -> Iterator[str]:
    """A new key for a server at `port`, in a file that this user alone can read, until the block ends."""
    key = secrets.token_hex(32)
    try:
        path = key_file(port)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the key of the server at port {port} cannot be kept in a file ({error}); set XDG_STATE_HOME to a folder "
            f"that you can write to, or a key of your own in the environment variable {VARIABLE}"
        ) from None
    try:
        yield key
    finally:
        path.unlink(missing_ok=True)


def key_for(url: str) -> str | None:
    """The key for the server at `url`: that of VARIABLE, else that kept for a port of this machine."""
    if key := os.environ.get(VARIABLE):
        return key
    with suppress(OSError, ValueError):
        place = urlsplit(url)
        if place.scheme != "unix" and place.port and is_loopback(place.hostname or ""):
            return read_regular_file(key_file(place.port), 200).decode("ascii")
    return None
