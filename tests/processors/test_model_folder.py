"""A model that is named and not in a folder: the hub is asked shortly, and what was meant is asked back."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as hub
import pytest
from helpers.processes import refusing_port

from mm_grpo.errors import ConfigError
from mm_grpo.processors import model_folder
from mm_grpo.processors.model_folder import read_config

NAME = "org/name"
COMMIT = "0123456789" * 4


@pytest.fixture
def hub_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models: dict[str, Path]
) -> Iterator[Callable[[int], None]]:
    """Lets this port of this machine be the hub, with an empty cache; the working folder is empty too."""

    def use(port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(hub, "ENDPOINT", url)
        monkeypatch.setattr(
            hub, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
        )

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HF_HUB_ETAG_TIMEOUT", 6)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    model_folder._REACHED.clear()
    yield use
    model_folder._REACHED.clear()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Takes connections and never answers, as a firewall's port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        server.setblocking(False)
        yield server


def asked(server: socket.socket) -> int:
    """How many connections it was asked for."""
    count = 0
    with suppress(BlockingIOError):
        while server.accept():
            count += 1
    return count


def refused(message: str, name: str = NAME) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(name)


@pytest.mark.slow
def test_a_hub_that_refuses_is_one_message_at_once(hub_at: Callable[[int], None]) -> None:
    with refusing_port() as port:
        hub_at(port)
        refused(
            r"'org/name': there is no folder .*in '.*work'.*hub: http.*cannot be reached.*Connection refused"
        )
    server = Hub(b"", broken=99)
    hub_at(server.port)
    refused("cannot be reached")
    assert len(server.asked) == 2  # huggingface_hub asks five times, with pauses, for each of six files


@pytest.mark.slow
def test_a_hub_that_never_answers_is_one_message_within_its_time_out(
    hub_at: Callable[[int], None], silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_at(silent.getsockname()[1])
    monkeypatch.setattr(hub, "HF_HUB_ETAG_TIMEOUT", 1)
    refused(r"cannot be reached .*[Tt]ime")
    assert asked(silent) == 1


def test_a_mistyped_folder_is_named(hub_at: Callable[[int], None]) -> None:
    Path("org/nome").mkdir(parents=True)
    with refusing_port() as port:
        hub_at(port)
        refused(r"did you mean 'org/nome'\?")


def test_offline_asks_nobody(
    hub_at: Callable[[int], None], silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_at(silent.getsockname()[1])
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    refused(r"'org/name': there is no folder.*HF_HUB_OFFLINE is set, and .* is not in the cache")
    assert asked(silent) == 0


def test_a_path_that_is_no_name_of_the_hub_asks_nobody(
    hub_at: Callable[[int], None], silent: socket.socket
) -> None:
    hub_at(silent.getsockname()[1])
    refused("no model config can be read there", "./org/a/b")
    assert asked(silent) == 0


class Hub:
    """Answers for one model. `asked` are the methods and paths; `broken` requests are dropped first."""

    def __init__(self, config: bytes, broken: int = 0) -> None:
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                outer.asked.append(f"{self.command} {self.path}")
                if len(outer.asked) <= broken:
                    self.connection.close()
                    return
                found = self.path == f"/{NAME}/resolve/main/config.json" or COMMIT in self.path
                found = found and self.path.endswith("/config.json")
                self.send_response(200 if found else 404)
                self.send_header("X-Repo-Commit", COMMIT)
                if not found:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("ETag", '"abc"')
                self.send_header("Content-Length", str(len(config)) if found else "0")
                self.end_headers()
                if found and self.command == "GET":
                    self.wfile.write(config)

            do_GET = do_HEAD

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.http.server_port


def test_one_dropped_connection_is_no_end(hub_at: Callable[[int], None], models: dict[str, Path]) -> None:
    server = Hub((models["qwen2_vl"] / "config.json").read_bytes(), broken=1)
    hub_at(server.port)
    assert read_config(NAME).model_type == "qwen2_vl"


def test_what_is_in_the_cache_is_used_with_a_warning(
    hub_at: Callable[[int], None], models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server = Hub((models["qwen2_vl"] / "config.json").read_bytes())
    hub_at(server.port)
    read_config(NAME)
    server.http.shutdown()
    server.http.server_close()
    model_folder._REACHED.clear()
    with caplog.at_level(logging.WARNING, logger="mm_grpo"):
        assert json.loads(read_config(NAME).to_json_string())["model_type"] == "qwen2_vl"
    assert "cannot be reached" in caplog.text and "the files in the cache are used" in caplog.text
    assert hub.HF_HUB_OFFLINE  # so that what is not in the cache is missed at once
