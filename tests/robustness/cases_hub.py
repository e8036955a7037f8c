"""`model.path` that is no folder here, and a hub that does not answer, answers nonsense, or lacks the model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

from helpers.processes import refusing_port

import robustness.run_case as by
from robustness.cases import Call, add
from robustness.whole_runs import write_config


@contextmanager
def refusing() -> Iterator[str]:
    with refusing_port() as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def silent() -> Iterator[str]:
    """Takes connections, as a firewall does, and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def unknown() -> Iterator[str]:
    yield "http://hub.invalid"  # a name that no server knows (RFC 2606)


@contextmanager
def answering(status: int, **headers: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


Hub = Callable[[], object]


def at(hub: Hub, path: str, command: str = "train", offline: bool = False) -> Callable[[Path], Call]:
    """A command on a machine that has this hub, and none of its models in its cache."""

    def make(folder: Path) -> Call:
        import huggingface_hub.constants as constants

        config = write_config(folder, model={"path": path})
        (folder / "models" / "my-model").mkdir(parents=True)

        def call() -> None:
            with hub() as url:  # type: ignore[attr-defined]
                settings = {
                    "ENDPOINT": url,
                    "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
                    "HF_HUB_CACHE": str(folder / "cache"),
                    "HF_HUB_OFFLINE": offline,
                }
                with patch.multiple(constants, **settings), patch.dict("os.environ", NO_PROXY="*"):
                    by.command(command, config)

        return call

    return make


NOT_REACHED = ("model.path = 'org/name'", "no folder 'org/name'", "cannot be reached")
GATED = {"X_Error_Code": "GatedRepo"}
for name, make, words in [
    ("a hub that refuses connections", at(refusing, "org/name"), NOT_REACHED),
    ("a hub that refuses connections, checked", at(refusing, "org/name", "check"), NOT_REACHED),
    ("a hub that refuses connections, and its doctor", at(refusing, "org/name", "doctor"), NOT_REACHED),
    ("a hub that never answers", at(silent, "org/name"), NOT_REACHED),
    ("a hub whose name is not known", at(unknown, "org/name"), NOT_REACHED),
    ("a hub, and HF_HUB_OFFLINE", at(silent, "org/name", offline=True), ("HF_HUB_OFFLINE is set", "no folder")),
    ("a mistyped folder", at(refusing, "models/my-modle"), ("did you mean 'models/my-model'?", "no folder")),
    ("a name without owner", at(refusing, "my-model"), ("model.path = 'my-model'", "cannot be reached")),
    ("a model that the hub lacks", at(lambda: answering(404, X_Error_Code="RepoNotFound"), "org/name"), ("org/name",)),
    ("a model that is gated", at(lambda: answering(401, **GATED), "org/name"), ("org/name", "gated")),
    ("a page of a hotel's network", at(lambda: answering(200), "org/name"), ("org/name",)),
    ("a path that no hub has", at(silent, "./org/name/of/it"), ("model.path",)),
]:  # fmt: skip
    add(f"weights: {name}", make, *words, heavy=True)
