"""A headless Chromium, and a server of a few pages that keeps what it was asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)  # fmt: skip


def _browser() -> str | None:
    """A chromium that shows a page on this machine; in some containers one is there and cannot start."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    for found in filter(None, map(shutil.which, names)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            page = "data:text/html,<p id=shown>"
            command = [found, *OPTIONS, f"--user-data-dir={profile}", "--dump-dom", page]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            except subprocess.TimeoutExpired:
                continue
            if 'id="shown"' in done.stdout:
                return found
    return None


BROWSER = _browser()
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium that starts here: what a browser shows of the page is not looked at"
)
LIGHT = "--blink-settings=preferredColorScheme=1"


@dataclass
class Site:
    """A server of a few pages that keeps the paths it was asked for."""

    address: str
    pages: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[Site]:
    """A site on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            body = found.pages.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Site(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


def browse(tmp_path: Path, address: str, *options: str, virtual_time: bool = True) -> str:
    """What a headless browser prints for an address; in virtual time its clock stands still while it works."""
    budget = ["--virtual-time-budget=3000"] if virtual_time else []
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(BROWSER), *OPTIONS, *budget, profile, *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def found_by(dom: str) -> list[str]:
    """The values that a script left in `data-found` of a page, which are separated by |."""
    match = re.search(r'data-found="([^"]*)"', dom)
    assert match is not None, dom[-2000:]
    return match[1].split("|")
