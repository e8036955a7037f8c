"""Hubs of models that do not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from helpers.processes import refusing_port


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
