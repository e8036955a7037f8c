"""Small servers that speak OpenEnv's protocol, over WebSockets or HTTP, and fail in the way that a test asks for."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        return {"observation": {"text": f"You are at {self.at}.", "seen": None}, "reward": None}

    def step(self, action: Any) -> Any:
        if action.get("direction") not in ("left", "right"):
            return None
        if action.get("steps", 1) > 9:
            raise ValueError("too tired")
        self.at += action.get("steps", 1) * (1 if action["direction"] == "right" else -1)
        side = 3000 if self.mode == "huge" else 40
        return {
            "observation": {
                "at": self.at,
                "view": {"type": "image", "image": f"data:image/png;base64,{png(side)}"},
            },
            "reward": 1.0 if self.at >= 4 else 0.25,
            "done": self.at >= 4,
        }


class OpenEnvServer:
    """`mode` is "" for one that works, else how it fails once it is asked for a step: hang, 500, html, closes, huge,
    odd_reward; or at once: full, no_schema, shared (HTTP: one world for all)."""

    def __init__(self, websockets: bool, mode: str = "") -> None:
        self.websockets, self.mode, self.open, self.resets = websockets, mode, 0, []  # type: ignore[var-annotated]
        self.released = threading.Event()
        self.worlds: dict[str, Road] = {}
        self.sockets: list[Any] = []
        if websockets:
            from websockets.sync.server import serve

            self.server: Any = serve(self._talk, "127.0.0.1", 0, process_request=self._get)
            port = self.server.socket.getsockname()[1]
        else:
            self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
            self.server.daemon_threads = True
            port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        arguments = () if websockets else (0.01,)
        self.thread = threading.Thread(target=self.server.serve_forever, args=arguments, daemon=True)
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
        if not self.websockets:
            self.server.server_close()
        self.thread.join(10)

    def schema(self) -> Any:
        return None if self.mode == "no_schema" else {"action": SCHEMA, "observation": {}, "state": {}}

    def closed(self, seconds: float = 10.0) -> bool:
        """Whether no conversation is open any more."""
        end = time.monotonic() + seconds
        while self.open and time.monotonic() < end:
            time.sleep(0.01)
        return self.open == 0

    # WebSockets ------------------------------------------------------------------------------

    def _get(self, connection: Any, request: Any) -> Any:
        if request.path == "/ws":
            return None
        schema = self.schema() if request.path == "/schema" else None
        return connection.respond(200 if schema else 404, json.dumps(schema))

    def _talk(self, socket: Any) -> None:
        def error(code: str, message: str) -> None:
            socket.send(json.dumps({"type": "error", "data": {"code": code, "message": message}}))

        if self.mode == "full":
            error("CAPACITY_REACHED", "all 1 are taken")
            return
        self.open += 1
        self.sockets.append(socket)
        road = Road(self.mode)
        try:
            for text in socket:
                said = json.loads(text)
                if said["type"] == "close":
                    return
                if said["type"] == "reset":
                    self.resets.append(said["data"])
                    found = road.reset(said["data"])
                else:
                    if self.mode == "hang":
                        self.released.wait(60)
                        return
                    if self.mode == "closes":
                        return
                    if self.mode == "html":
                        socket.send("<html>Bad Gateway</html>")
                        continue
                    try:
                        found = road.step(said["data"])
                    except ValueError as raised:
                        error("EXECUTION_ERROR", str(raised))
                        continue
                    if found is None:
                        error("VALIDATION_ERROR", "direction is wrong")
                        continue
                    if self.mode == "odd_reward":
                        found["reward"] = "much"
                socket.send(json.dumps({"type": "observation", "data": found}))
        finally:
            self.open -= 1


def _handler(owner: OpenEnvServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/schema":
                self._answer(200 if owner.schema() else 404, owner.schema())
            elif path == "/state":
                asked = query.removeprefix("episode_id=")
                known = list(owner.worlds)[-1:] if owner.mode == "shared" else [asked]
                self._answer(200, {"episode_id": known[0]})
            else:
                self._answer(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = body.pop("episode_id")
            if self.path == "/reset":
                owner.resets.append(body)
                owner.worlds.pop(name, None)
                owner.worlds[name] = Road(owner.mode)
                self._answer(200, owner.worlds[name].reset(body))
            elif owner.mode == "hang":
                owner.released.wait(60)
            elif owner.mode == "500":
                self._answer(500, "Internal Server Error")
            elif owner.mode == "html":
                self._answer(200, None, b"<html>Bad Gateway</html>")
            else:
                found = owner.worlds[name].step(body["action"])
                self._answer(200 if found else 422, found or {"detail": "direction is wrong"})

        def _answer(self, status: int, found: Any, body: bytes | None = None) -> None:
            body = json.dumps(found).encode() if body is None else body
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: Any) -> None: ...

    return Handler
