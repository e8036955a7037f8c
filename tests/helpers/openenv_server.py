"""A small server that speaks the protocol of openenv 0.10.0, and fails in the way that a test asks for."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from typing import Any

from PIL import Image

SCHEMA = {
    "title": "WalkAction",
    "description": "Walk along the road.",
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "direction": {"$ref": "#/$defs/Direction"},
        "steps": {"type": "integer", "default": 1, "description": "How many."},
        "metadata": {"type": "object"},
    },
    "$defs": {"Direction": {"enum": ["left", "right"], "type": "string", "title": "Direction"}},
    "required": ["direction"],
}
ECHO = {
    "name": "echo_message", "description": "Echo back the provided message.",
    "input_schema": {
        "additionalProperties": False, "required": ["message"], "type": "object",
        "properties": {"message": {"type": "string", "description": "The message to echo back"}},
    },
}  # fmt: skip
MCP_SCHEMA = {"title": "CallToolAction", "properties": {"type": {"const": "call_tool"}, "tool_name": {}}}


def png(side: int, colour: Any = "red") -> str:
    """A square as base64 of a PNG."""
    out = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


class Road:
    """Begins at the seed modulo 3, and is over at 4; each step has a reward of 0.25, the last one of 1."""

    def __init__(self, mode: str) -> None:
        self.mode, self.at = mode, 0

    def reset(self, data: Any) -> Any:
        self.at = int(data.get("start", data["seed"] % 3))
        if self.mode == "mcp":  # has no fields of its own
            metadata = {"status": "ready", "message": "Echo environment ready!"}
            return {"observation": {"metadata": metadata}, "reward": 0.0, "done": False, "metadata": metadata}
        seen = {"metadata": {}, "text": f"You are at {self.at}.", "seen": None}
        return {"observation": seen, "reward": None, "done": False}

    def step(self, action: Any) -> Any:
        if self.mode == "mcp":
            return {"observation": self.call(action), "reward": None, "done": False}
        if action.get("direction") not in ("left", "right"):
            return None
        if action.get("steps", 1) > 9:
            raise ValueError("too tired")
        metadata = {"goal": 4}
        self.at += action.get("steps", 1) * (1 if action["direction"] == "right" else -1)
        return {
            "observation": {
                "metadata": metadata,
                "at": self.at,
                "view": {"type": "image", "image": f"data:image/png;base64,{png(40)}"},
            },
            "reward": "much" if self.mode == "odd_reward" else 1.0 if self.at >= 4 else 0.25,
            "done": self.at >= 4,
            "metadata": metadata,
        }

    def call(self, action: Any) -> Any:
        """A call of an MCP tool; one without a message is refused, and the message "look" shows an image too."""
        if action["type"] == "list_tools":
            return {"metadata": {}, "tools": [ECHO]}
        answer = {"metadata": {}, "tool_name": action["tool_name"], "result": None, "error": None}
        message = action["arguments"].get("message")
        if not isinstance(message, str):
            error = {"error_type": "execution_error", "message": "should be a valid string"}
            return {**answer, "error": error}
        content = [{"type": "text", "text": message, "annotations": None, "meta": None}]
        if message == "look":
            content.append({"type": "image", "data": png(40), "mimeType": "image/png", "annotations": None})
        return {**answer, "result": {"content": content, "data": message, "is_error": False}}


class OpenEnvServer:
    """`mode` is "" for one that works, else how it fails once it is asked for a step: hang, html, closes,
    odd_reward; or at once: full, no_schema; or what it is: http (of 0.1, without /ws), mcp, slow_close."""

    def __init__(self, mode: str = "") -> None:
        from websockets.sync.server import serve

        self.mode, self.open, self.resets = mode, 0, []  # type: ignore[var-annotated]
        self.released = threading.Event()
        self.sockets: list[Any] = []
        self.server: Any = serve(self._talk, "127.0.0.1", 0, process_request=self._get)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def __enter__(self) -> OpenEnvServer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def stop(self) -> None:
        self.released.set()
        self.server.shutdown()
        for socket in self.sockets:
            socket.close()
        self.thread.join(10)

    def closed(self, seconds: float = 10.0) -> bool:
        """Whether no conversation is open any more."""
        end = time.monotonic() + seconds
        while self.open and time.monotonic() < end:
            time.sleep(0.01)
        return self.open == 0

    def _get(self, connection: Any, request: Any) -> Any:
        if request.path == "/ws" and self.mode != "http":
            return None
        found = request.path == "/schema" and self.mode != "no_schema"
        action = MCP_SCHEMA if self.mode == "mcp" else SCHEMA
        return connection.respond(200 if found else 404, json.dumps({"action": action} if found else None))

    def _talk(self, socket: Any) -> None:
        def error(code: str, message: str, **more: Any) -> None:
            socket.send(json.dumps({"type": "error", "data": {"message": message, "code": code, **more}}))

        self.open += 1
        self.sockets.append(socket)
        road = Road(self.mode)
        try:
            for text in socket:
                said = json.loads(text)
                if said["type"] == "close":
                    return
                if said["type"] == "reset":
                    if self.mode == "full":
                        error("CAPACITY_REACHED", "all 1 are taken")
                        return
                    self.resets.append(said["data"])
                    found = road.reset(said["data"])
                elif self.mode in ("hang", "closes"):
                    self.released.wait(60 if self.mode == "hang" else 0)
                    return
                elif self.mode == "html":
                    socket.send("<html>Bad Gateway</html>")
                    continue
                else:
                    try:
                        found = road.step(said["data"])
                    except ValueError as raised:
                        error("EXECUTION_ERROR", str(raised))
                        continue
                    if found is None:
                        error("VALIDATION_ERROR", "Invalid message", errors=[{"msg": "direction is wrong"}])
                        continue
                socket.send(json.dumps({"type": "observation", "data": found}))
        finally:
            time.sleep(0.2 if self.mode == "slow_close" else 0)
            self.open -= 1
