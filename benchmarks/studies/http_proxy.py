"""A proxy before a server's socket that knows HTTP, so that a fault can come at a chosen request.

`Proxy(url)` listens at a port of 127.0.0.1. `at(path, number, call)` makes a call once the next request number `number`
(1 is the first) whose path ends with `path` is on its way to the server, before it is answered. While `silent` is set
nothing passes in either direction, and connections stay open; `refuse` and `accept`, `reset` and `close` do what they
say. What single answers may be wrong with is tested at the fake server (rollout/test_served_faults.py).
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

LOOK = 0.05


@dataclass
class _Watch:
    path: str
    left: int
    call: Callable[[], object]


class Proxy:
    """See above. `url` is where it listens, `target` the path of the server's Unix socket."""

    def __init__(self, url: str) -> None:
        self.target = url.removeprefix("unix://")
        self.lock = threading.Lock()
        self.watches: list[_Watch] = []
        self.open: set[socket.socket] = set()
        self.silent = False
        self.port = 0
        self.accept()
        self.url = f"http://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Pass everything on, also what was held back."""
        self.silent = False

    def at(self, path: str, number: int, call: Callable[[], object]) -> None:
        with self.lock:
            self.watches.append(_Watch(path, number, call))

    def refuse(self) -> None:
        """Refuse connections, and reset those that are open."""
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.reset()

    def accept(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listening,), daemon=True).start()

    def reset(self) -> None:
        """End the connections that are open, with RST."""
        with self.lock:
            found = list(self.open)
        for one in found:
            _abort(one)

    def close(self) -> None:
        with suppress(OSError):
            self.refuse()

    # one connection --------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = listening.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with self.lock:
            self.open.add(near)
        far = socket.socket(socket.AF_UNIX)
        try:
            self._while_silent()
            far.connect(self.target)
            while not _closed(near, far) and (asked := _message(near)) is not None:
                self._while_silent()
                far.sendall(asked)
                self._noticed(asked.split(b" ", 2)[1].split(b"?")[0].decode())
                answer = _message(far)
                self._while_silent()
                if answer is None:
                    break
                near.sendall(answer)
        except OSError:
            pass
        finally:
            far.close()
            with self.lock:
                self.open.discard(near)
            _abort(near)

    def _while_silent(self) -> None:
        while self.silent:
            time.sleep(LOOK)

    def _noticed(self, path: str) -> None:
        with self.lock:
            for watch in self.watches:
                watch.left -= path.endswith(watch.path)
            due = [watch for watch in self.watches if watch.left == 0]
            self.watches = [watch for watch in self.watches if watch.left]
        for watch in due:
            threading.Thread(target=watch.call, daemon=True).start()


def _closed(near: socket.socket, far: socket.socket) -> bool:
    """Wait until one side says something; whether the server has closed its connection."""
    ready, _, _ = select.select([near, far], [], [])
    return far in ready and not far.recv(1, socket.MSG_PEEK)


def _abort(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _message(source: socket.socket) -> bytes | None:
    """One message with its body, of a given length or in chunks; None at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = source.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
    length = int(fields.get(b"content-length", b"0"))
    chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
    while (not body.endswith(b"0\r\n\r\n")) if chunked else len(body) < length:
        more = source.recv(1 << 20)
        if not more:
            return None
        body += more
    return head + b"\r\n\r\n" + body
