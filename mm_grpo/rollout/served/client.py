"""HTTP calls to one server, with deadlines and a key.

There are two kinds of failure. `ServerUnreachable` is the server's (connection refused or cut, too late, 5xx): another
server may answer the same request. `ServerRefused` is the request's (4xx): every server would refuse it.

All clients of a process share one thread with an event loop. So a thousand requests wait without a thread each, and a
cancelled request closes its connection, by which vLLM knows to abort it. Proxies of the environment (HTTP_PROXY) are
not used: they would see every prompt, and mostly do not reach a server on this host.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from mm_grpo.background import BackgroundLoop
from mm_grpo.files import parse_json
from mm_grpo.terminal import redact

Body = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None

KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A connection whose other end vanished (a host lost power, an address translation forgot it) ends after 30 s of
silence and 3 unanswered probes 10 s apart. A slow answer is safe: the kernel of the server's host answers probes."""
CONNECT_TIMEOUT = 5.0
MESSAGE_LENGTH = 400
"""Most characters of a server's own message."""


_LOOP = BackgroundLoop("mm_grpo-http")
in_background = _LOOP.submit
"""Run a coroutine in the thread of all clients."""
wait = _LOOP.result
"""Wait for its result."""


class ServerError(Exception):
    """Failed call to the server at `url`. `reason` does not name the url."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason = url, reason


class ServerUnreachable(ServerError):
    """Connection refused or cut, too late, 5xx, or an unreadable answer: another server may be asked."""


class ServerRefused(ServerError):
    """A `status` of 4xx: every server would refuse the request."""

    def __init__(self, url: str, reason: str, status: int) -> None:
        super().__init__(url, reason)
        self.status = status


@contextmanager
def reading(url: str, path: str) -> Iterator[None]:
    """Turn errors of a block that parses the answer of the server at `url` to `path` into ServerUnreachable."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:MESSAGE_LENGTH]
        raise ServerUnreachable(
            url, f"the answer to {path} is not as vLLM with mm_grpo's plugin gives it ({cause})"
        ) from error


class ServerClient:
    """Client of one server, at `http://host:port`, `https://...` or `unix:///path/of/socket`. Thread-safe.

    `timeout` is the deadline of a whole call, in seconds. `key` is sent as a bearer token and stands in no message.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout: float) -> None:
        self.url, self.timeout, self._key = url.rstrip("/"), timeout, key
        self._http: Any = None
        self._calls: set[Future[Any]] = set()

    def call(self, path: str, json: Body = None, **options: Any) -> Any:
        """Return the decoded JSON answer, None for an empty body. Takes the options of `request`.

        Raises ServerUnreachable or ServerRefused, and CancelledError if the client is closed meanwhile.
        """
        future = in_background(self.request(path, json, **options))
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return wait(future)

    async def request(
        self,
        path: str,
        json: Body = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: float | None = None,
        method: str = "POST",
    ) -> Any:
        """Do the same as `call` in a coroutine of `in_background`. A function as `json` runs in a thread."""
        seconds = self.timeout if timeout is None else timeout
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with asyncio.timeout(seconds):
                body = await asyncio.to_thread(_encoded, json) if json is not None else None
                answer = await self._open().request(
                    method,
                    path,
                    content=body,
                    headers=headers,
                    params=params,
                    timeout=httpx.Timeout(None, connect=min(seconds, CONNECT_TIMEOUT)),
                )
        except TimeoutError as error:
            raise ServerUnreachable(self.url, f"no answer to {path} within {seconds:g} s") from error
        except httpx.RequestError as error:
            connecting = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            failure = "no connection" if connecting else f"the connection was cut during {path}"
            raise ServerUnreachable(self.url, f"{failure} ({_cause(error)})") from error
        if answer.status_code >= 400:
            message = _message(redact(answer.content.decode(errors="replace"), self._key))
            reason = f"{path} was answered with HTTP {answer.status_code}: {message}"
            if answer.status_code >= 500 or answer.status_code in (408, 429):
                raise ServerUnreachable(self.url, reason)
            raise ServerRefused(self.url, reason, answer.status_code)
        with reading(self.url, path):
            return parse_json(answer.content) if answer.content else None

    def close(self) -> None:
        """Close the connections and cancel unanswered calls."""
        for future in list(self._calls):
            future.cancel()
        http, self._http = self._http, None
        if http is not None:
            wait(in_background(http.aclose()))

    def _open(self) -> Any:
        if self._http is None:
            path = self.url.removeprefix("unix://") if self.url.startswith("unix://") else None
            self._http = httpx.AsyncClient(
                base_url="http://localhost" if path else self.url,
                headers={"content-type": "application/json"},
                transport=httpx.AsyncHTTPTransport(
                    uds=path,
                    trust_env=False,
                    socket_options=None if path else KEEP_ALIVE,
                    # a connection for each call, because vLLM closes one unannounced after an error of a worker
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                ),
                trust_env=False,
            )
        return self._http


def _encoded(json: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> bytes:
    return jsonlib.dumps(json() if callable(json) else json, separators=(",", ":"), allow_nan=False).encode()


def _cause(error: BaseException) -> str:
    """Return the innermost reason of an exception of httpx, whose own text is often empty."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__


def _message(text: str) -> str:
    """Return the message of an error's body in vLLM's layouts, else the body itself."""
    with suppress(ValueError):
        value = parse_json(text)
        for key in ("error", "message", "detail"):
            value = value.get(key, value) if isinstance(value, dict) else value
        text = value if isinstance(value, str) else jsonlib.dumps(value)
    text = " ".join(text.split())
    return (text[:MESSAGE_LENGTH] + " ...") if len(text) > MESSAGE_LENGTH else text or "no message"
