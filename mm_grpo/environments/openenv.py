"""Environments on an OpenEnv server: the action's schema is the tool's, observations may hold images.

`rollout.environment: openenv:http://HOST:PORT`, or a subclass of `OpenEnv` with a `base_url`, which may say how an
observation is shown. Protocol: OpenEnv of Meta and Hugging Face, package openenv-core. How a server is spoken to is
openenv_client.py's affair.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from hashlib import sha256
from typing import Any, Literal

from mm_grpo.environments.openenv_client import (
    Connection,
    HttpConnection,
    Server,
    Step,
    WebSocketConnection,
)
from mm_grpo.environments.own_tools import EnvironmentGone, OwnTools, Tool
from mm_grpo.errors import ConfigError

ENCODED = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""First characters of PNG, JPEG, GIF and WebP in base64."""
ABOUT_IMAGES = frozenset(("type", "mimeType", "mime_type", "media_type", "detail", "format", "encoding"))
"""Fields that say nothing once the image beside them is shown."""
_KNOWN: dict[tuple[str, bool], tuple[bool, Mapping[str, Any] | None, list[Mapping[str, Any]]]] = {}


class OpenEnv(OwnTools):
    """A conversation with an OpenEnv server. Its tool takes the fields of the server's action, or are its MCP tools.

    Args:
        base_url: http://HOST:PORT of the server; ws://HOST:PORT to ask it over WebSockets alone.
        action: the JSON schema of an action, by default what the server says under /schema.
        tool: what the model calls an action; by default the schema's title, such as `echo` of EchoAction, else `step`.
        timeout: seconds that each request may take, > 0; below rollout.tool_timeout, or that one ends the call.
        reward: what the steps' rewards make of the conversation: their sum, or the last.
        alone: this conversation has the server for itself, so it need not tell conversations apart.

    All are attributes of the class too, for a subclass to set.
    """

    base_url: str = ""
    action: Mapping[str, Any] | None = None
    tool: str | None = None
    timeout: float = 20.0
    reward: Literal["sum", "last"] = "sum"
    alone: bool = False

    def __init__(self, base_url: str | None = None, **given: Any) -> None:
        for name, value in given.items():
            if name not in ("action", "tool", "timeout", "reward", "alone"):
                raise TypeError(f"OpenEnv has no argument {name!r}")
            setattr(self, name, value)
        self.base_url = base_url or self.base_url
        if self.reward not in ("sum", "last"):
            raise ConfigError(f"OpenEnv: reward = {self.reward!r}; it must be 'sum' or 'last'")
        self.done = False
        self._server = Server(self.base_url, self.timeout)
        self._connection: Connection | None = None
        self._rewards: list[float] = []

    def tools(self) -> Mapping[str, Tool]:
        """The tool that takes an action, or the server's MCP tools. EnvironmentGone where it cannot be asked."""
        _, schema, listed = self._ask_server()
        if listed:
            made = [self._mcp_tool(each) for each in listed]
            return {tool.__name__: tool for tool in made}
        schema = self.action or schema
        if not schema:
            raise ConfigError(f"{self._server} has no /schema; give `action` in a subclass of OpenEnv")
        title = str(schema.get("title", ""))
        name = self.tool or _snake(title.removesuffix("Action")) or "step"
        properties = dict(schema.get("properties", {}))
        if "metadata" not in schema.get("required", ()):
            properties.pop("metadata", None)  # of every action; the server's own affair
        told = {**schema, "properties": properties}
        description = str(schema.get("description") or f"Act in the environment: {title or 'one step'}.")
        return {name: Tool(name, description, told, self._act)}

    def reset(self, **row: Any) -> Any:
        """Begin a conversation: the server gets the row's columns that are JSON, and a `seed` that depends on the row
        alone where it has none."""
        self.close()
        self.done, self._rewards = False, []
        columns = row.keys() - {"prompt", "images"}
        sent = {key: value for key, value in row.items() if key in columns and _is_json(value)}
        if "seed" not in sent:
            texts = [str(m.get("content")) for m in row.get("prompt") or () if isinstance(m, Mapping)]
            digest = sha256(json.dumps([sent, texts], sort_keys=True).encode()).digest()
            sent["seed"] = int.from_bytes(digest[:4], "big") >> 1
        self._connection = self._connect()
        step = self._asked(self._connection.reset, sent)
        self.done = step.done
        return self.show(step.observation) or None

    def show(self, observation: Mapping[str, Any]) -> Any:
        """Show an observation to the model; a subclass may do it otherwise. By default a single text as it is,
        else the fields as JSON, and behind it the images."""
        return shown(observation)

    def get_reward(self) -> float | None:
        """Combine the steps' rewards; None where no step had one."""
        if not self._rewards:
            return None
        return sum(self._rewards) if self.reward == "sum" else self._rewards[-1]

    def close(self) -> None:
        """End the conversation; the server lets go of its environment."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _act(self, **action: Any) -> Any:
        return self.show(self._step(action).observation)

    def _step(self, action: Mapping[str, Any]) -> Step:
        if self.done or self._connection is None:
            raise ValueError("the episode is over")
        step = self._asked(self._connection.step, action)
        self.done = step.done
        if step.reward is not None:
            self._rewards.append(step.reward)
        return step

    def _asked(self, ask: Callable[[Mapping[str, Any]], Step], data: Mapping[str, Any]) -> Step:
        try:
            return ask(data)
        except EnvironmentGone:
            self.close()
            raise

    def _mcp_tool(self, listed: Mapping[str, Any]) -> Tool:
        name = str(listed.get("name"))

        def call(**arguments: Any) -> Any:
            given = {key: value for key, value in arguments.items() if value is not None}
            seen = self._step({"type": "call_tool", "tool_name": name, "arguments": given}).observation
            if seen.get("error"):
                raise RuntimeError(_message(seen["error"]))
            result = seen.get("result", seen)
            if isinstance(result, Mapping) and isinstance(result.get("content"), list):
                if result.get("is_error") or result.get("isError"):
                    raise RuntimeError(_message(result["content"]))
                return self.show({"content": result["content"]})
            return self.show({"result": result})

        return Tool(name, str(listed.get("description", "")), listed.get("input_schema", {}), call)

    def _connect(self) -> Connection:
        websockets, _, _ = self._ask_server()
        if websockets:
            try:
                return WebSocketConnection(self._server)
            except LookupError as error:
                raise EnvironmentGone(f"{self._server}: /ws {error}") from None
        return HttpConnection(self._server, uuid.uuid4().hex)

    def _ask_server(self) -> tuple[bool, Mapping[str, Any] | None, list[Mapping[str, Any]]]:
        """Ask the server once: over WebSockets or not, the schema of its action, and its MCP tools."""
        key = self.base_url, self.alone
        if key in _KNOWN:
            return _KNOWN[key]
        status, found = self._server.request("GET", "/schema")
        schema = found.get("action") if status == 200 and isinstance(found, Mapping) else None
        listed: list[Mapping[str, Any]] = []
        try:
            socket = WebSocketConnection(self._server)
        except LookupError as error:
            if self._server.websockets_only:
                raise EnvironmentGone(f"{self._server}: /ws {error}") from None
            if not self.alone:
                self._check_apart()
            return _KNOWN.setdefault(key, (False, schema, listed))
        with closing(socket):
            if schema and "tool_name" in schema.get("properties", {}):
                listed = socket.step({"type": "list_tools"}).observation.get("tools", [])
        return _KNOWN.setdefault(key, (True, schema, listed))

    def _check_apart(self) -> None:
        """ConfigError where a server without WebSockets has one world for all conversations, or forgets each."""
        one, other = (HttpConnection(self._server, f"{name}-{uuid.uuid4().hex}") for name in ("a", "b"))
        one.reset({"seed": 0})
        other.reset({"seed": 0})
        for connection in (one, other):
            state = connection.state()
            if not isinstance(state, Mapping) or state.get("episode_id") != connection.episode_id:
                raise ConfigError(
                    f"{self._server} does not tell conversations apart over HTTP (its /state has not the episode_id of "
                    "/reset); let it serve /ws, or give each OpenEnv a server of its own with alone=True"
                )


def named(base_url: str) -> OpenEnv:
    """The environment of `rollout.environment: openenv:BASE_URL`."""
    return OpenEnv(base_url)


def source(base_url: str) -> None:
    """The code of the environment, which is the server's."""


def shown(observation: Any) -> list[Any]:
    """The texts and images of an observation, as a tool returns them. Images are data URLs, base64 of PNG, JPEG, GIF or
    WebP, and arrays [height][width][3 or 4] of 0 to 255."""
    images: list[Any] = []
    rest = _without_images(observation, images)
    if isinstance(rest, Mapping) and len(rest) == 1:
        (only,) = rest.values()
        rest = only if isinstance(only, str | list) else rest
    if isinstance(rest, list) and rest and all(_is_text_part(part) for part in rest):
        rest = "\n".join(part["text"] for part in rest)
    text = rest if isinstance(rest, str) else json.dumps(rest, ensure_ascii=False) if rest else ""
    parts: list[Any] = [{"type": "text", "text": text}] if text else []
    return parts + [{"type": "image", "image": image} for image in images]


def _without_images(value: Any, images: list[Any]) -> Any:
    """A value of JSON without what is an image, which is added to `images`, and without empty fields."""
    if (image := _image(value)) is not None:
        images.append(image)
        return None
    before = len(images)
    if isinstance(value, Mapping):
        found = {key: _without_images(each, images) for key, each in value.items()}
        kept = {key: each for key, each in found.items() if each is not None and each != {}}
        return None if len(images) > before and kept.keys() <= ABOUT_IMAGES else kept
    if isinstance(value, list):
        found_in = [_without_images(each, images) for each in value]
        kept_in = [each for each in found_in if each is not None] if len(images) > before else found_in
        return None if len(images) > before and not kept_in else kept_in
    return value


def _image(value: Any) -> Any:
    if isinstance(value, str):
        if value[:11].lower() == "data:image/":
            return value
        if value.startswith(ENCODED) and len(value) >= 64:
            try:
                data = base64.b64decode(value, validate=True)
            except binascii.Error:
                return None
            return data if data[:4] != b"RIFF" or data[8:12] == b"WEBP" else None
    if isinstance(value, list) and len(value) >= 8 and isinstance(value[0], list) and len(value[0]) >= 8:
        return _picture(value)
    return None


def _picture(rows: list[Any]) -> Any:
    import numpy as np
    from PIL import Image

    try:
        array = np.asarray(rows)
    except ValueError:
        return None
    if array.ndim != 3 or array.shape[2] not in (3, 4) or array.dtype.kind != "i":
        return None
    return Image.fromarray(array.astype(np.uint8)) if array.min() >= 0 and array.max() <= 255 else None


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _message(error: Any) -> str:
    """The text of an MCP error."""
    if isinstance(error, Mapping) and error.get("message"):
        return str(error["message"])
    return str(shown(error)[0]["text"]) if shown(error) else "the tool failed"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"\W+", "_", name)).lower().strip("_")
