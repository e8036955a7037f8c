"""Environments on an OpenEnv server: its action is the tool, or its MCP tools are; observations may hold images.

`rollout.environment` is openenv:http://HOST:PORT, or a subclass of `OpenEnv` with a `base_url`, which may override how
an observation is shown. Protocol: OpenEnv of Meta and Hugging Face, package openenv, 0.2 on: a WebSocket (`/ws`) for
each conversation, and the schema of an action over HTTP. A server that is missing, hangs or sends an invalid answer
raises `EnvironmentGone` with its address; an action that it refuses a ValueError, an exception of its environment a
RuntimeError.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from mm_grpo.environments.own_tools import EnvironmentGone, Tool
from mm_grpo.errors import ConfigError
from mm_grpo.files import parse_json
from mm_grpo.rewards.scores import score_of
from mm_grpo.terminal import redact

MOST_BYTES = 100 * 2**20
"""Largest answer in bytes, as in openenv-core's own client."""
CLOSING = 5.0
"""Seconds that a server may take to close an environment, until which it counts as open there."""
SHOWN = 200
"""Characters of a server's answer in a message."""
ENCODED = ("iVBORw0KGgo", "/9j/")
"""First characters of PNG and JPEG in base64."""


class OpenEnv:
    """Conversation with an OpenEnv server, whose tools are its action with that one's fields, or its MCP tools.

    A subclass may set `base_url` and `timeout`, and override `show` (what the model sees of an observation) and
    `get_reward` (from the steps' `rewards` to the conversation's).
    """

    base_url: str = ""
    """http://HOST:PORT of the server."""
    timeout: float = 20.0
    """Seconds of each request; below rollout.tool_timeout, which would otherwise end the call first."""

    def __init__(self, base_url: str | None = None) -> None:
        self.base_url = base_url or self.base_url
        self.done, self.rewards = False, list[float]()
        self._conversation = _Conversation(self.base_url, self.timeout)

    def tools(self) -> Mapping[str, Tool]:
        """Return the tools by name, also before the first `reset`.

        Raise EnvironmentGone if the server does not answer.
        """
        schema, listed = _tools_of(self.base_url, self.timeout)
        if listed is not None:
            fields = [(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]
            return {
                name: Tool(name, text or name, schema, partial(self._act, name))
                for name, text, schema in fields
            }
        title = str(schema.get("title", ""))
        name = _snake(title.removesuffix("Action")) or "step"
        properties = dict(schema.get("properties", {}))
        if "metadata" not in schema.get("required", ()):
            properties.pop("metadata", None)  # every action has it, for the server's own use
        description = str(schema.get("description") or f"Act in the environment: {title or 'one step'}.")
        act = partial(self._act, None)
        return {name: Tool(name, description, {**schema, "properties": properties}, act)}

    def reset(self, **row: Any) -> Any:
        """Begin a conversation: send the row's columns that are JSON.

        If the row has no `seed`, derive one from its contents.
        """
        self.close()
        self.rewards = []
        columns = row.keys() - {"prompt", "images", "videos"}
        data = {key: value for key, value in row.items() if key in columns and _is_json(value)}
        if "seed" not in data:
            texts = [str(m.get("content")) for m in row.get("prompt") or () if isinstance(m, Mapping)]
            digest = sha256(json.dumps([data, texts], sort_keys=True).encode()).digest()
            data["seed"] = int.from_bytes(digest[:4], "big") >> 1
        self._conversation.open()
        observation, _, self.done = self._conversation.ask("reset", data)
        return self.show(observation) or None

    def show(self, observation: Mapping[str, Any]) -> Any:
        """Return what the model sees: by default a single text as it is, else the fields as JSON; then the images.

        `metadata` is for programs, and may hold the answer: it is shown only if there is nothing else.
        """
        content = observation.get("result")
        if "tool_name" in observation and isinstance(content, Mapping) and "content" in content:
            parts = content["content"]
            return [p for part in parts for p in ([part] if part["type"] == "text" else shown(part))]
        fields = {key: value for key, value in observation.items() if key != "metadata"}
        return shown(fields or observation.get("metadata", {}))

    def get_reward(self) -> float | None:
        """Return the sum of the steps' rewards; None if no step had one."""
        return sum(self.rewards) if self.rewards else None

    def close(self) -> None:
        """End the conversation; the server closes its environment."""
        self._conversation.close()

    def _act(self, mcp_tool: str | None, /, **action: Any) -> Any:
        if self.done:
            raise ValueError("the episode is over")
        if mcp_tool is not None:
            action = {"type": "call_tool", "tool_name": mcp_tool, "arguments": action}
        observation, reward, self.done = self._conversation.ask("step", action)
        self.rewards += [] if reward is None else [reward]
        if mcp_tool is not None and (error := observation.get("error")):
            raise ValueError(error["message"])
        return self.show(observation)


@cache
def _tools_of(base_url: str, timeout: float) -> tuple[Mapping[str, Any], list[Any] | None]:
    """Return the schema of a server's action, and its MCP tools if the action calls one. Each server is asked once."""
    conversation = _Conversation(base_url, timeout)
    schema = conversation.schema()
    try:
        conversation.open()  # a server without /ws is refused at the start
        kind = schema.get("properties", {}).get("type", {})
        if kind.get("const") != "call_tool" and schema.get("title") != "Action":  # the class of any action
            return schema, None
        return schema, conversation.ask("step", {"type": "list_tools"})[0]["tools"]
    finally:
        conversation.close()


class _Conversation:
    """WebSocket to a server, which keeps an environment from `open` to `close`; requests take `timeout` seconds."""

    def __init__(self, base_url: str, timeout: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"openenv: the address is {redact(base_url)!r}; it must be http://HOST:PORT")
        self.http, self.timeout = base_url.rstrip("/"), timeout
        self.local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
        self._opened = ExitStack()
        self._socket: Any = None

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of an action."""
        import httpx

        try:
            answer = httpx.get(f"{self.http}/schema", timeout=self.timeout, trust_env=not self.local)
            schema: Mapping[str, Any] = parse_json(answer.raise_for_status().text, dict)["action"]
            return schema
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError) as error:
            raise self._gone("/schema", error) from None

    def open(self) -> None:
        """Begin a conversation."""
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        options: dict[str, Any] = {"open_timeout": self.timeout, "close_timeout": 1, "max_size": MOST_BYTES}
        options |= {"proxy": None} if self.local else {}
        try:
            opening = connect(f"ws{self.http.removeprefix('http')}/ws", **options)
            self._socket = self._opened.enter_context(opening)
        except (WebSocketException, OSError) as error:
            raise self._gone("/ws", error) from None

    def ask(self, request: str, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        """Send a `reset` or `step`, and return the observation's fields, the reward, and whether it is over."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            with suppress(ConnectionClosed):  # a server that is full says so before it closes
                self._socket.send(json.dumps({"type": request, "data": dict(data)}))
            text = self._socket.recv(timeout=self.timeout)
        except (WebSocketException, OSError) as error:
            raise self._gone(request, error) from None
        try:
            answer = parse_json(text, dict)
            fields = dict(answer["data"])
            if answer.get("type") != "error":
                return _step(fields)
        except (LookupError, TypeError, ValueError) as wrong:
            why = f"answered {request} with {repr(text)[:SHOWN]}, which is no answer to it ({wrong!r})"
            raise self._gone(request, why) from None
        code, message = fields.get("code"), str(fields.get("errors") or fields.get("message", ""))[:SHOWN]
        if code in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
            raise (ValueError if code == "VALIDATION_ERROR" else RuntimeError)(message)
        if code == "CAPACITY_REACHED":
            message += (
                " Start it with max_concurrent_envs (of create_app) as large as a step's conversations."
            )
        gone = self._gone(request, f"refused {request} ({code}: {message})")
        raise RuntimeError(str(gone)) if request == "reset" else gone  # a reset that raises stops the run

    def close(self, seconds: float = CLOSING) -> None:
        """Tell the server that the conversation is over, and wait until it has closed the environment."""
        from websockets.exceptions import WebSocketException

        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(WebSocketException, OSError):
                socket.send(json.dumps({"type": "close"}))
                # raises: a full server would refuse the next conversation before
                socket.recv(timeout=seconds)
        self._opened.close()

    def _gone(self, request: str, why: BaseException | str) -> EnvironmentGone:
        """Close the socket, and return the error for a request without an answer; a TimeoutError makes it late."""
        self.close(0)
        late = isinstance(why, TimeoutError)
        if late:
            why = f"had not answered {request} after {self.timeout:g} s"
        elif isinstance(why, BaseException):
            error = f"{type(why).__name__}: {why}".rstrip(": ")
            why = f"cannot be asked for {request} ({redact(error)}); start it, or correct its address"
        return EnvironmentGone(f"the OpenEnv server at {redact(self.http)} {why}", late=late)


def _step(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
    observation, is_over = data["observation"], data.get("done", False)
    if not isinstance(observation, Mapping) or not isinstance(is_over, bool):
        raise TypeError("observation or done")
    return observation, score_of(data.get("reward")), is_over


def shown(observation: Any) -> list[Any]:
    """Return the texts and images of an observation, as a tool returns them.

    Images are data URLs, base64 of PNG or JPEG, and arrays [height][width][3 or 4] of 0 to 255, also flat ones beside
    a field NAME_shape.
    """
    images: list[Any] = []
    fields = _without_images(observation, images)
    if isinstance(fields, Mapping) and len(fields) == 1:
        (field,) = fields.values()
        fields = field if isinstance(field, str) else fields
    text = fields if isinstance(fields, str) else json.dumps(fields, ensure_ascii=False) if fields else ""
    parts: list[Any] = [{"type": "text", "text": text}] if text else []
    return parts + [{"type": "image", "image": image} for image in images]


def _without_images(value: Any, images: list[Any]) -> Any:
    """Return a JSON value without images and empty fields; append the images to `images`."""
    if (image := _image(value)) is not None:
        images.append(image)
        return None
    count = len(images)
    if isinstance(value, Mapping):
        value = {key: _shaped(field, value.get(f"{key}_shape")) for key, field in value.items()}
        fields = {key: _without_images(field, images) for key, field in value.items()}
        if len(images) > count and fields.get("type") in ("image", "image_url"):
            return None  # the other fields are the image's type and encoding
        return {key: field for key, field in fields.items() if field is not None and field not in ({}, [])}
    if isinstance(value, list):
        elements = [_without_images(element, images) for element in value]
        return [element for element in elements if element is not None]
    return value


def _shaped(value: Any, shape: Any) -> Any:
    """Return a flat list in this shape [height, width, 3 or 4]; other values as they are."""
    if isinstance(value, list) and isinstance(shape, list) and len(shape) == 3:
        import numpy as np

        with suppress(TypeError, ValueError):  # of another size
            return np.reshape(value, shape).tolist()
    return value


def _image(value: Any) -> Any:
    if isinstance(value, str):
        if value[:11].lower() == "data:image/":
            return value
        if value.startswith(ENCODED) and len(value) >= 64:
            with suppress(binascii.Error):
                return base64.b64decode(value, validate=True)
    elif isinstance(value, list) and len(value) >= 8 and isinstance(value[0], list) and len(value[0]) >= 8:
        import numpy as np
        from PIL import Image

        with suppress(ValueError):  # rows of unequal lengths
            array = np.asarray(value)
            if array.ndim == 3 and array.shape[2] in (3, 4) and array.min() >= 0 and array.max() <= 255:
                return Image.fromarray(array.astype(np.uint8))
    return None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"\W+", "_", name)).lower().strip("_")
