"""Client of an OpenAI-compatible server: `ask` sends one chat request and returns the text of the answer.

The `openai` package sends it. It tries again after a failed or broken connection, a time-out, 408, 409, 429 (after its
Retry-After) and 5xx. Other answers are a mistake in the settings and are raised at once.

The key is read from its environment variable for each request, is never in a variable here, and is cut out of
what the server echoes. Proxies of the environment (HTTPS_PROXY, NO_PROXY) are used, but never for this machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mm_grpo.errors import RewardError
from mm_grpo.rewards.builtins import library
from mm_grpo.terminal import redact

# By event loop, because a connection belongs to the loop that opened it.
_CLIENTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None, int], Any]] = (
    weakref.WeakKeyDictionary()
)


async def ask(
    url: str, body: Mapping[str, Any], *, key_env: str | None, attempts: int, seconds: float
) -> str:
    """Post the request `body` to {url}/chat/completions and return the text of the model's answer; empty when the
    answer is no chat completion.

    `seconds` bounds each of at most `attempts` tries. Raise RewardError if all of them fail.
    """
    openai = library("judge")
    create = _client(url, key_env, attempts).chat.completions.with_raw_response.create
    # Without key_env no key may be sent: the client would take OPENAI_API_KEY, whatever server this is.
    headers = {"Authorization": openai.Omit()} if key_env is None else {}
    # Nothing is raised in these handlers: the frames of `openai`, which hold the key, would hang on the error.
    try:
        return _content(await create(**body, timeout=seconds, extra_headers=headers))
    except openai.APIStatusError as error:
        # redacted before it is cut: half a key is no key to the replacement
        text = " ".join(_redacted(error.response.text[:2000], key_env).split())[:200]
        problem = f"answered with status {error.status_code}: {text}"
    except openai.APIConnectionError as error:
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {_redacted(str(cause), key_env)}".rstrip(": ")
        problem = f"gave no answer in {attempts} tries of {seconds:g} s; the last: {why}"
    raise RewardError(f"{redact(url)} {problem}")


def _client(url: str, key_env: str | None, attempts: int) -> Any:
    """Return the running loop's client, with the key as the environment holds it now."""
    clients = _CLIENTS.setdefault(asyncio.get_running_loop(), {})
    settings = url, key_env, attempts
    if settings not in clients:
        openai = library("judge")
        http = openai.DefaultAsyncHttpxClient(
            trust_env=not _is_this_machine(urlsplit(url).hostname or ""),
            follow_redirects=False,
            # No connection outlives its request, so that none is left open when the loop ends.
            limits=type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=0),
        )
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=attempts - 1, http_client=http)
        client.organization = client.project = None  # else it sends OPENAI_ORG_ID and OPENAI_PROJECT_ID
        clients[settings] = client
    if key_env is not None:
        _check_key(key_env)
        clients[settings].api_key = os.environ[key_env].strip()
    return clients[settings]


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_key(key_env: str) -> None:
    """Raise RewardError unless the variable holds a key. It is in no local variable: a traceback would show it."""
    if not os.environ.get(key_env, "").strip():
        raise RewardError(
            f"the environment variable {key_env} is not set, and key_env says that it holds the key; set it, or "
            f"give key_env: null for a server without keys"
        )
    if not all("!" <= character <= "~" for character in os.environ[key_env].strip()):
        raise RewardError(
            f"the environment variable {key_env} holds no key: it has spaces or control characters"
        )


def _content(response: Any) -> str:
    try:
        content = response.parse().choices[0].message.content
    except (ValueError, AttributeError, IndexError, TypeError):
        return ""
    return content if isinstance(content, str) else ""


def _redacted(text: str, key_env: str | None) -> str:
    return str(redact(text, os.environ.get(key_env, "").strip() if key_env else None))
