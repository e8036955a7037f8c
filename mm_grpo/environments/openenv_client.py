"""A conversation with an OpenEnv server over its WebSocket (`/ws`), and the schema of its action.

Messages are those of the package openenv-core, 0.2 on. A server that is not there, hangs or answers nonsense is
`EnvironmentGone`, with its address in one line; an action that it refuses is a ValueError, and an exception of its
environment a RuntimeError. Each request has a deadline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

from mm_grpo.environments.own_tools import EnvironmentGone
from mm_grpo.errors import ConfigError
from mm_grpo.files import parse_json
from mm_grpo.terminal import redact

MOST_BYTES = 100 * 2**20
"""Bytes of one answer, as openenv-core's own client bounds it."""
SHOWN = 200
"""Characters of a server's answer that a message holds."""


@dataclass(frozen=True)
class Step:
    """A server's answer to a reset or a step: its observation's fields, the reward, and whether it is over."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Server:
    """An address, and how long each request to it may take, in seconds."""

    def __init__(self, base_url: str, timeout: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ConfigError(
                f"openenv: the server's address is {redact(base_url)!r}; it must be http://HOST:PORT or ws://HOST:PORT"
            )
        self.timeout = timeout
        self.local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
        secure = "s" if parts.scheme in ("https", "wss") else ""
        rest = f"{parts.netloc}{parts.path}".rstrip("/")
        self.http, self.ws = f"http{secure}://{rest}", f"ws{secure}://{rest}/ws"

    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of an action; an empty one where the server has none."""
        import httpx

        try:
            answer = httpx.get(f"{self.http}/schema", timeout=self.timeout, trust_env=not self.local)
            found = parse_json(answer.text, dict) if answer.status_code == 200 else {}
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise self.gone("/schema", error) from None
        return found.get("action") or {}

    def gone(self, what: str, why: BaseException | str) -> EnvironmentGone:
        """The error of a request `what` that was not answered; of a TimeoutError it is late."""
        late = isinstance(why, TimeoutError)
        if late:
            why = f"had not answered {what} after {self.timeout:g} s"
        elif isinstance(why, BaseException):
            named = f"{type(why).__name__}: {why}".rstrip(": ")
            why = f"cannot be asked for {what} ({redact(named)}); start it, or correct its address"
        return EnvironmentGone(f"the OpenEnv server at {redact(self.http)} {why}", late=late)


class Conversation:
    """A WebSocket of a server, which keeps an environment for it until it is closed."""

    def __init__(self, server: Server) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self.server, self._open = server, ExitStack()
        limits: dict[str, Any] = {"open_timeout": server.timeout, "close_timeout": 1, "max_size": MOST_BYTES}
        if server.local:
            limits["proxy"] = None
        try:
            self._socket = self._open.enter_context(connect(server.ws, **limits))
        except (WebSocketException, OSError) as error:
            raise server.gone("/ws", error) from None

    def ask(self, what: str, data: Mapping[str, Any]) -> Step:
        """The answer to a `reset` or a `step`."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            with suppress(ConnectionClosed):  # a server that is full says so before it closes
                self._socket.send(json.dumps({"type": what, "data": dict(data)}))
            text = self._socket.recv(timeout=self.server.timeout)
        except (WebSocketException, OSError) as error:
            raise self.server.gone(what, error) from None
        try:
            found = parse_json(text, dict)
            failed = dict(found["data"]) if found.get("type") == "error" else None
            step = _step(found["data"]) if failed is None else None
        except (AttributeError, LookupError, TypeError, ValueError) as wrong:
            answer = f"answered {what} with {repr(text)[:SHOWN]}, which is no answer to it ({wrong!r})"
            raise self.server.gone(what, answer) from None
        return step or self._failed(what, failed or {})

    def close(self) -> None:
        """Say that the conversation is over, and close it; a server that is gone is not waited for."""
        from websockets.exceptions import WebSocketException

        with suppress(WebSocketException, OSError):
            self._socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _failed(self, what: str, error: Mapping[str, Any]) -> NoReturn:
        code, message = error.get("code"), str(error.get("message", ""))[:SHOWN]
        if code == "VALIDATION_ERROR":
            raise ValueError(f"refused: {json.dumps(error.get('errors', message), default=str)[:SHOWN]}")
        if code == "EXECUTION_ERROR":
            raise RuntimeError(message)
        why = f"refused {what} ({code}: {message})"
        if code == "CAPACITY_REACHED":
            why += "; let its max_concurrent_envs be at least prompts x generations of a step"
        gone = self.server.gone(what, why)
        raise RuntimeError(str(gone)) if what == "reset" else gone  # a reset that raises stops the run


def _step(data: Any) -> Step:
    reward, done = data.get("reward"), data.get("done", False)
    if not isinstance(data["observation"], Mapping) or not isinstance(done, bool):
        raise TypeError("observation or done")
    if reward is not None and not math.isfinite(reward):
        raise ValueError("reward")
    return Step(data["observation"], None if reward is None else float(reward), done)
