"""Client of an OpenAI-compatible server: `ask` sends one chat request and gives the text of the answer.

The `openai` package sends it. Its own retries are off, for `ask` does more: a try is bounded as a whole (some servers
send blank lines while a request waits, which no read time-out ends), a 429 holds back every request to that server,
and an answer that is no chat completion is asked for again. Tried again, with doubling waits or as long as a
Retry-After header says, is what may pass: no connection, a broken one, a time-out, 408, 409, 425, 429 and 5xx. Other
answers are a mistake in the settings and are raised at once.

The key is read from its environment variable for each request, is in no variable of ours, and is cut out of
whatever the server echoes. Proxies of the environment (HTTPS_PROXY, NO_PROXY) are used, but never for this machine.
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import os
import random
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mm_grpo.errors import RewardError
from mm_grpo.rewards.builtins import library
from mm_grpo.terminal import redact

FIRST_WAIT = 0.5  # seconds before the second try; each further wait is twice the one before
LONGEST_WAIT = 60.0  # seconds; a server that asks for more is not waited for
_PASSING = frozenset((408, 409, 425, 429))  # and all from 500


@dataclass
class _Server:
    """The client of one address and key, and until when (time.monotonic) the server asked to be left alone."""

    client: Any
    quiet_until: float = 0.0


# By event loop, for connections belong to the loop that they were made in.
_SERVERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None], _Server]] = (
    weakref.WeakKeyDictionary()
)


async def ask(
    url: str, body: Mapping[str, Any], *, key_env: str | None, attempts: int, seconds: float
) -> str:
    """The text of a chat model's answer to the request `body`, posted to {url}/chat/completions.

    `seconds` bounds each of at most `attempts` tries. RewardError when none gave an answer.
    """
    openai = library("judge")
    server, where = _server(url, key_env), redact(url)
    create = server.client.chat.completions.with_raw_response.create
    # Without a key of its own the client must send none: it would take OPENAI_API_KEY, whatever server this is.
    headers = {"Authorization": openai.Omit()} if key_env is None else {}
    problem = ""
    for attempt in range(attempts):
        while (left := server.quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(left)
        status, asked = 0, None
        # Nothing is raised in these handlers: the frames of `openai`, which hold the key, would hang on the error.
        try:
            async with asyncio.timeout(seconds):
                response = await create(**body, timeout=seconds, extra_headers=headers)
            if (answer := _content(response)) is not None:
                return answer
            problem = f"an answer that is no chat completion: {_excerpt(response.text, key_env)}"
        except openai.APIStatusError as error:
            status, asked = error.status_code, _retry_after(error.response.headers.get("retry-after"))
            problem = f"status {status}: {_excerpt(error.response.text, key_env)}"
        except (openai.APIConnectionError, TimeoutError) as error:
            cause = error if isinstance(error, TimeoutError) else error.__cause__ or error
            problem = f"{type(cause).__name__}: {_redacted(str(cause), key_env)}".rstrip(": ")
        if 0 < status < 500 and status not in _PASSING:
            raise RewardError(f"{where} answered with {problem}")
        if asked is not None and asked > LONGEST_WAIT:
            raise RewardError(f"{where} asks to come back in {asked:.0f} s ({problem})")
        # spread, so that not all come back at once
        wait = FIRST_WAIT * 2**attempt * random.uniform(0.8, 1.2) if asked is None else asked
        if status == 429:
            server.quiet_until = max(server.quiet_until, time.monotonic() + wait)
        elif attempt + 1 < attempts:
            await asyncio.sleep(wait)
    raise RewardError(f"{where} gave no answer in {attempts} tries of {seconds:g} s; the last: {problem}")


def _server(url: str, key_env: str | None) -> _Server:
    """Return the running loop's client, with the key as the environment holds it now."""
    servers = _SERVERS.setdefault(asyncio.get_running_loop(), {})
    if (url, key_env) not in servers:
        openai = library("judge")
        http = openai.DefaultAsyncHttpxClient(
            trust_env=not _is_this_machine(urlsplit(url).hostname or ""),
            follow_redirects=False,
            # No connection outlives its request, so that none is left open when the loop ends.
            limits=type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=0),
        )
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)
        client.organization = client.project = None  # else those of OPENAI_ORG_ID and OPENAI_PROJECT_ID
        servers[url, key_env] = _Server(client)
    if key_env is not None:
        _check_key(key_env)
        servers[url, key_env].client.api_key = os.environ[key_env].strip()
    return servers[url, key_env]


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_key(key_env: str) -> None:
    """RewardError unless the variable holds a key. The key is in no local variable, for a traceback shows those."""
    if not os.environ.get(key_env, "").strip():
        raise RewardError(
            f"the environment variable {key_env} is not set, and key_env says that it holds the key; set it, or "
            f"give key_env: null for a server without keys"
        )
    if not all("!" <= character <= "~" for character in os.environ[key_env].strip()):
        raise RewardError(
            f"the environment variable {key_env} holds no key: it has spaces or control characters"
        )


def _content(response: Any) -> str | None:
    try:
        content = response.parse().choices[0].message.content
    except (ValueError, AttributeError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None


def _retry_after(value: str | None) -> float | None:
    """Seconds from now, from a number or a date; None when it is neither."""
    try:
        return max(0.0, float(value or ""))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value or "").timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _excerpt(text: str, key_env: str | None) -> str:
    # redacted before it is cut: half a key is no key to the replacement
    return " ".join(_redacted(text[:2000], key_env).split())[:200] or "nothing"


def _redacted(text: str, key_env: str | None) -> str:
    return str(redact(text, os.environ.get(key_env, "").strip() if key_env else None))
