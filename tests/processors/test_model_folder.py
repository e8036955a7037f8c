"""A model that is named and not in a folder: the hub is asked shortly. Hubs that do not answer: robustness/cases.py."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as hub
import pytest

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


class Hub:
    """Answers for one model. `asked` are the methods and paths; where it is `broken`, every request is dropped."""

    def __init__(self, config: bytes, broken: bool = False) -> None:
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                outer.asked.append(f"{self.command} {self.path}")
                if broken:
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


def test_a_hub_that_cannot_be_reached_is_asked_once(
    hub_at: Callable[[int], None], models: dict[str, Path]
) -> None:
    server = Hub((models["qwen2_vl"] / "config.json").read_bytes(), broken=True)
    hub_at(server.port)
    with pytest.raises(ConfigError, match=r"'org/other': there is no folder .*cannot be reached"):
        read_config("org/other")
    heads = [one for one in server.asked if one.startswith("HEAD")]
    assert len(heads) == 1  # huggingface_hub asks five times, with pauses, for each of six files
    with pytest.raises(ConfigError, match="no model config can be read there"):
        read_config("./org/a/b")
    assert not any("a/b" in one for one in server.asked)  # no name of the hub


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
