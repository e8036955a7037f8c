"""Asking a model behind an OpenAI-compatible endpoint: one request, its retries, and no key in any message.

`ask` posts a chat request and gives the text of the answer. It tries again, with doubling waits, when the
server cannot be reached, breaks off, takes too long, or answers 408, 429 or 5xx, and waits as long as
a Retry-After header says; a 429 holds back all requests to that server. Other answers are a mistake in
the settings and are raised at once.

The key lives in an environment variable and is read while a request is sent: it is in no variable of
ours, and it is cut out of whatever the server echoes.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import random
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mm_grpo.errors import RewardError
from mm_grpo.rewards.builtins.libraries import library

FIRST_WAIT = 0.5  # seconds before the second try; each further wait is twice the one before
LONGEST_WAIT = 60.0  # seconds; a server that asks for more is not waited for
_PASSING = frozenset((408, 425, 429, 500, 502, 503, 504, 529))


@dataclass
class _Server:
    """The HTTP client of one event loop, and until when each host asked to be left alone."""

    client: Any
    quiet_until: dict[str, float] = field(default_factory=dict)


_SERVERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Server] = weakref.WeakKeyDictionary()


async def ask(
    url: str, body: Mapping[str, Any], *, key_env: str | None, attempts: int, seconds: float
) -> str:
    """The text of a chat model's answer to the request `body`, posted to {url}/chat/completions.

    `seconds` bounds each of at most `attempts` tries. RewardError when none gave an answer.
    """
    httpx = library("judge")
    server = _server()
    host, where = urlsplit(url).netloc.rpartition("@")[2], shown(url)
    auth = _bearer(key_env)
    problem = ""
    for attempt in range(attempts):
        await _quiet(server, host)
        wait = (
            FIRST_WAIT * 2**attempt * random.uniform(0.8, 1.2)
        )  # spread, so that all do not come back at once
        try:
            async with asyncio.timeout(seconds):  # httpx bounds each read, not the whole
                response = await server.client.post(
                    f"{url.rstrip('/')}/chat/completions", json=body, auth=auth, timeout=seconds
                )
        except (httpx.TransportError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {_redacted(str(error), key_env)}".rstrip(": ")
        except httpx.InvalidURL as error:
            raise RewardError(
                f"{where}: {error}; set url to the base address, such as http://host:8000/v1"
            ) from None
        else:
            if response.status_code == 200:
                answer = _content(response)
                if answer is not None:
                    return answer
                problem = f"an answer that is no chat completion: {_excerpt(response, key_env)}"
            else:
                problem = f"status {response.status_code}: {_excerpt(response, key_env)}"
                if response.status_code not in _PASSING:
                    raise RewardError(f"{where} answered with {problem}")
                asked = _retry_after(response.headers.get("retry-after"))
                if asked is not None and asked > LONGEST_WAIT:
                    raise RewardError(f"{where} asks to come back in {asked:.0f} s ({problem})")
                if asked is not None:
                    wait = asked
                if response.status_code == 429:
                    until = time.monotonic() + wait
                    server.quiet_until[host] = max(server.quiet_until.get(host, 0.0), until)
        if attempt + 1 < attempts:
            await asyncio.sleep(wait)
    raise RewardError(f"{where} gave no answer in {attempts} tries of {seconds:g} s; the last: {problem}")


def _server() -> _Server:
    """The client of the running loop; HTTP clients belong to the loop they were made in."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        httpx = library("judge")
        # No connection outlives its request, so that none is left open when the loop ends.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        _SERVERS[loop] = _Server(httpx.AsyncClient(limits=limits))
    return _SERVERS[loop]


async def _quiet(server: _Server, host: str) -> None:
    while (left := server.quiet_until.get(host, 0.0) - time.monotonic()) > 0:
        await asyncio.sleep(left)


def _bearer(key_env: str | None) -> Any:
    """What puts the key into a request as it is sent; None without a key."""
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise RewardError(
            f"the environment variable {key_env} is not set, and key_env says that it holds the key; set it, or "
            f"give key_env: null for a server without keys"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise RewardError(
            f"the environment variable {key_env} holds no key: it has spaces or control characters"
        )
    del key
    variable = key_env

    class Bearer(library("judge").Auth):  # type: ignore[misc]
        def auth_flow(self, request: Any) -> Any:
            request.headers["Authorization"] = "Bearer " + os.environ[variable].strip()
            yield request

    return Bearer()


def _content(response: Any) -> str | None:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None


def _retry_after(value: str | None) -> float | None:
    """Seconds from now, from a number or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _excerpt(response: Any, key_env: str | None) -> str:
    # redacted before it is cut: half a key is no key to the replacement
    return " ".join(_redacted(response.text[:2000], key_env).split())[:200] or "nothing"


def _redacted(text: str, key_env: str | None) -> str:
    key = os.environ.get(key_env, "").strip() if key_env else ""
    return text.replace(key, "***") if key else text


def shown(url: str) -> str:
    """The address without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
