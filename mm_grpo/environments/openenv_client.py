"""The two ways to talk to an OpenEnv server: a WebSocket for each conversation (`/ws`), or HTTP (`/reset`, `/step`).

Messages are those of the package openenv-core (0.2 on for WebSockets). A server that is not there, answers 5xx, hangs
or answers nonsense is `EnvironmentGone`, with the address and what to do in one line; an action that it refuses is a
ValueError, and an exception of its environment a RuntimeError. Each request has a deadline that bounds it as a whole.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Union
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
        self.websockets_only = parts.scheme.startswith("ws")
        rest = f"{parts.netloc}{parts.path}".rstrip("/")
        self.http, self.ws = f"http{secure}://{rest}", f"ws{secure}://{rest}/ws"

    def __str__(self) -> str:
        return f"the OpenEnv server at {redact(self.http)}"

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """The status of an answer below 500, and its JSON, None where it has none."""
        import httpx

        what, end = f"{method} {path}", time.monotonic() + self.timeout
        data = bytearray()
        try:
            with (
                httpx.Client(timeout=self.timeout, trust_env=not self.local) as client,
                client.stream(method, self.http + path, json=body) as response,
            ):
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise EnvironmentGone(f"{self} answered more than {MOST_BYTES} bytes to {what}")
                    if time.monotonic() > end:
                        raise self.late(what)
        except httpx.TimeoutException:
            raise self.late(what) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise self.unreachable(error) from None
        text = data.decode(errors="replace")
        if response.status_code >= 500:
            status = f"{response.status_code} {response.reason_phrase}"
            raise EnvironmentGone(f"{self} answered {status} to {what}: {text[:SHOWN]!r}; look into its log")
        try:
            return response.status_code, parse_json(text)
        except ValueError:
            if response.status_code == 200:
                raise self.nonsense(what, text) from None
            return response.status_code, None

    def late(self, what: str) -> EnvironmentGone:
        return EnvironmentGone(f"{self} had not answered {what} after {self.timeout:g} s", late=True)

    def unreachable(self, error: BaseException) -> EnvironmentGone:
        why = redact(f"{type(error).__name__}: {error}".rstrip(": "))
        return EnvironmentGone(f"{self} cannot be reached ({why}); start it, or correct its address")

    def nonsense(self, what: str, answer: Any) -> EnvironmentGone:
        return EnvironmentGone(
            f"{self} answered {what} with {repr(answer)[:SHOWN]}, which is no answer to it"
        )

    def step_of(self, what: str, payload: Any) -> Step:
        """An answer to a reset or a step, checked."""
        if not isinstance(payload, Mapping) or not isinstance(payload.get("observation"), Mapping):
            raise self.nonsense(what, payload)
        reward, done = payload.get("reward"), payload.get("done", False)
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise self.nonsense(f"{what}, as its reward,", reward)
        if not isinstance(done, bool):
            raise self.nonsense(f"{what}, as done,", done)
        return Step(payload["observation"], None if reward is None else float(reward), done)


Connection = Union["HttpConnection", "WebSocketConnection"]
"""One conversation with a server."""


class HttpConnection:
    """A conversation over HTTP, which a server knows again by its `episode_id`, if by anything."""

    def __init__(self, server: Server, episode_id: str) -> None:
        self.server, self.episode_id = server, episode_id

    def reset(self, arguments: Mapping[str, Any]) -> Step:
        return self._ask("/reset", {**arguments, "episode_id": self.episode_id})

    def step(self, action: Mapping[str, Any]) -> Step:
        return self._ask("/step", {"action": dict(action), "episode_id": self.episode_id})

    def state(self) -> Any:
        """The state of this conversation's world; None where the server does not say it."""
        status, found = self.server.request("GET", f"/state?episode_id={self.episode_id}")
        return found if status == 200 else None

    def close(self) -> None:
        """Nothing is open between requests."""

    def _ask(self, path: str, body: Mapping[str, Any]) -> Step:
        status, found = self.server.request("POST", path, body)
        if status in (400, 422):
            raise ValueError(f"refused: {json.dumps(found)[:SHOWN]}")
        if status != 200:
            raise EnvironmentGone(f"{self.server} answered {status} to POST {path}; is it an OpenEnv server?")
        return self.server.step_of(f"POST {path}", found)


class WebSocketConnection:
    """A conversation over `/ws`, for which the server keeps an environment of its own until it is closed.

    Raises LookupError where the server has no `/ws`.
    """

    def __init__(self, server: Server) -> None:
        from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        self.server, self._open = server, ExitStack()
        limits: dict[str, Any] = {"open_timeout": server.timeout, "close_timeout": 1, "max_size": MOST_BYTES}
        if server.local:
            limits["proxy"] = None
        try:
            self._socket = self._open.enter_context(connect(server.ws, **limits))
        except TimeoutError:
            raise server.late("the opening of /ws") from None
        except InvalidHandshake as error:
            status = error.response.status_code if isinstance(error, InvalidStatus) else 0
            if status < 500 or status == 501:  # "not implemented", of servers of HTTP alone
                raise LookupError(f"answered {status}" if status else str(error)) from None
            raise server.unreachable(error) from None
        except (WebSocketException, OSError) as error:
            raise server.unreachable(error) from None

    def reset(self, arguments: Mapping[str, Any]) -> Step:
        return self._ask("reset", arguments)

    def step(self, action: Mapping[str, Any]) -> Step:
        return self._ask("step", action)

    def close(self) -> None:
        """Say that the conversation is over, and close it; a server that is gone is not waited for."""
        from websockets.exceptions import WebSocketException

        try:
            self._socket.send(json.dumps({"type": "close"}))
        except (WebSocketException, OSError):
            pass
        finally:
            self._open.close()

    def _ask(self, what: str, data: Mapping[str, Any]) -> Step:
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            with suppress(ConnectionClosed):  # a server that is full says so before it closes
                self._socket.send(json.dumps({"type": what, "data": dict(data)}))
            text = self._socket.recv(timeout=self.server.timeout)
        except TimeoutError:
            raise self.server.late(what) from None
        except (WebSocketException, OSError) as error:
            raise self.server.unreachable(error) from None
        try:
            found = parse_json(text)
        except ValueError:
            raise self.server.nonsense(what, text) from None
        kind = found.get("type") if isinstance(found, Mapping) else None
        if kind == "error" and isinstance(found.get("data"), Mapping):
            self._raise(what, found["data"])
        if kind != "observation":
            raise self.server.nonsense(what, found)
        return self.server.step_of(what, found.get("data"))

    def _raise(self, what: str, error: Mapping[str, Any]) -> None:
        code, message = error.get("code"), str(error.get("message", ""))[:SHOWN]
        if code == "VALIDATION_ERROR":
            raise ValueError(f"refused: {json.dumps(error.get('errors', message), default=str)[:SHOWN]}")
        if code == "EXECUTION_ERROR":
            raise RuntimeError(message)
        why = f"{self.server} refused {what} ({code}: {message})"
        if code == "CAPACITY_REACHED":
            why += "; let its max_concurrent_envs be at least prompts x generations of a step"
        raise RuntimeError(why) if what == "reset" else EnvironmentGone(why)
