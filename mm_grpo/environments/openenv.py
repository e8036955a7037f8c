"""Environments on an OpenEnv server: the action's schema is the tool's, observations may hold images.

`rollout.environment: openenv:http://HOST:PORT`, or a subclass of `OpenEnv` with a `base_url`, which may say how an
observation is shown. Protocol: OpenEnv of Meta and Hugging Face, package openenv-core; openenv_client.py speaks it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from hashlib import sha256
from typing import Any, Literal

from mm_grpo.environments.openenv_client import Conversation, Server, Step
from mm_grpo.environments.own_tools import EnvironmentGone, OwnTools, Tool
from mm_grpo.errors import ConfigError

ENCODED = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""First characters of PNG, JPEG, GIF and WebP in base64."""
ABOUT_IMAGES = frozenset(("type", "mimeType", "mime_type", "media_type", "detail", "format", "encoding"))
"""Fields that say nothing once the image beside them is shown."""


class OpenEnv(OwnTools):
    """A conversation with an OpenEnv server. Its tool takes the fields of the server's action, or are its MCP tools.

    A subclass sets what differs: `base_url`, http://HOST:PORT of the server; `action`, the JSON schema of an action, by
    default what the server has under /schema; `tool`, what the model calls an action, by default the schema's title,
    such as `echo` of EchoAction, else `step`; `timeout`, seconds that each request may take, below
    rollout.tool_timeout, or that one ends the call; `reward`, what the steps' rewards make of the conversation.
    """

    base_url: str = ""
    action: Mapping[str, Any] | None = None
    tool: str | None = None
    timeout: float = 20.0
    reward: Literal["sum", "last"] = "sum"

    def __init__(self, base_url: str | None = None) -> None:
        self.base_url = base_url or self.base_url
        self.done = False
        self._server = Server(self.base_url, self.timeout)
        self._conversation: Conversation | None = None
        self._rewards: list[float] = []

    def tools(self) -> Mapping[str, Tool]:
        """The tool that takes an action, or the server's MCP tools. EnvironmentGone where it cannot be asked."""
        schema, listed = _offer(self.base_url, self.timeout)
        if listed:
            return {tool.__name__: tool for tool in map(self._mcp_tool, listed)}
        schema = self.action or schema
        if not schema:
            raise ConfigError(f"{self.base_url} has no /schema; give `action` in a subclass of OpenEnv")
        title = str(schema.get("title", ""))
        name = self.tool or _snake(title.removesuffix("Action")) or "step"
        properties = dict(schema.get("properties", {}))
        if "metadata" not in schema.get("required", ()):
            properties.pop("metadata", None)  # of every action; the server's own affair
        description = str(schema.get("description") or f"Act in the environment: {title or 'one step'}.")
        return {name: Tool(name, description, {**schema, "properties": properties}, self._act)}

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
        self._conversation = Conversation(self._server)
        return self.show(self._ask("reset", sent).observation) or None

    def show(self, observation: Mapping[str, Any]) -> Any:
        """Show an observation to the model; a subclass may do it otherwise. By default a single text as it is,
        else the fields as JSON, and behind it the images."""
        return shown(observation)

    def get_reward(self) -> float | None:
        """Combine the steps' rewards; None where no step had one."""
        combined = {"sum": sum(self._rewards), "last": self._rewards[-1] if self._rewards else 0.0}
        return combined[self.reward] if self._rewards else None

    def close(self) -> None:
        """End the conversation; the server lets go of its environment."""
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.close()

    def _act(self, **action: Any) -> Any:
        return self.show(self._step(action))

    def _step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.done:
            raise ValueError("the episode is over")
        step = self._ask("step", action)
        if step.reward is not None:
            self._rewards.append(step.reward)
        return step.observation

    def _ask(self, what: str, data: Mapping[str, Any]) -> Step:
        assert self._conversation is not None
        try:
            step = self._conversation.ask(what, data)
        except EnvironmentGone:
            self.close()
            raise
        self.done = step.done
        return step

    def _mcp_tool(self, listed: Mapping[str, Any]) -> Tool:
        name = str(listed["name"])

        def call(**arguments: Any) -> Any:
            given = {key: value for key, value in arguments.items() if value is not None}
            seen = self._step({"type": "call_tool", "tool_name": name, "arguments": given})
            if seen.get("error"):
                raise RuntimeError(_text_of(seen["error"]))
            result = seen.get("result", seen)
            if isinstance(result, Mapping) and isinstance(result.get("content"), list):
                if result.get("is_error") or result.get("isError"):
                    raise RuntimeError(_text_of(result["content"]))
                result = result["content"]
            return self.show({"result": result})

        return Tool(name, str(listed.get("description", "")), listed.get("input_schema", {}), call)


@cache
def _offer(base_url: str, timeout: float) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The schema of a server's action, and its MCP tools; a server is asked once."""
    server = Server(base_url, timeout)
    schema = server.schema()
    with closing(Conversation(server)) as conversation:
        if "tool_name" in schema.get("properties", {}):
            return schema, conversation.ask("step", {"type": "list_tools"}).observation.get("tools", [])
    return schema, []


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


def _text_of(error: Any) -> str:
    """The text of an MCP error."""
    if isinstance(error, Mapping) and error.get("message"):
        return str(error["message"])
    return "".join(part.get("text", "") for part in shown(error)) or "the tool failed"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"\W+", "_", name)).lower().strip("_")
