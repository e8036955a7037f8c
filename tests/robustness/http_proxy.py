"""A proxy before a server's socket that knows HTTP, so that a fault can come at a chosen request, and that has faults.

`Proxy(url)` listens at a port of 127.0.0.1. `at(path, number, call)` makes a call once the next request number `number`
(1 is the first) whose path ends with `path` is on its way to the server, before it is answered. Faults are attributes,
put back by `heal`:

    silent     nothing passes in either direction, and connections stay open
    refusing   connections are refused; `refuse` and `accept` set it
    closing    connections are accepted and reset, and those that were open are
    status     what requests are answered with instead of being passed on: {end of the path: code}, "" is every path
    times      how many requests `status`, `halved` or `garbled` applies to, None is all
    halved     answers to requests of this path are cut in their middle
    garbled    answers to requests of this path are a page of HTML, with 200
    delay      seconds that answers to `/generate` come late
    held       answers to `/generate` do not come
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

PAGE = b"<html><body>the gateway is busy</body></html>"
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
        self.heal()
        self.port = 0
        self.accept()
        self.url = f"http://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Pass everything on, also what was held back."""
        self.silent = self.closing = self.held = False
        self.status: dict[str, int] = {}
        self.times: int | None = None
        self.halved = self.garbled = ""
        self.delay = 0.0

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
                if self.closing:
                    _abort(near)
                else:
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
                path = asked.split(b" ", 2)[1].split(b"?")[0].decode()
                code = next((c for end, c in self.status.items() if path.endswith(end)), None)
                if code is not None and self._counts():
                    near.sendall(_answer(code, b"error"))
                    continue
                far.sendall(asked)
                self._noticed(path)
                answer = _message(far)
                if path.endswith("/generate"):
                    time.sleep(self.delay)
                    while self.held:
                        time.sleep(LOOK)
                self._while_silent()
                if answer is None:
                    break
                if self.halved and path.endswith(self.halved) and self._counts():
                    near.sendall(answer[: len(answer) // 2])
                    break
                if self.garbled and path.endswith(self.garbled) and self._counts():
                    answer = _answer(200, PAGE)
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

    def _counts(self) -> bool:
        """Whether a fault of `times` applies once more."""
        with self.lock:
            if self.times is None:
                return True
            self.times -= 1
            return self.times >= 0

    def _noticed(self, path: str) -> None:
        calls = []
        with self.lock:
            for watch in list(self.watches):
                if path.endswith(watch.path):
                    watch.left -= 1
                    if watch.left == 0:
                        self.watches.remove(watch)
                        calls.append(watch.call)
        for call in calls:
            threading.Thread(target=call, daemon=True).start()


def _closed(near: socket.socket, far: socket.socket) -> bool:
    """Wait until one side says something; whether the server has closed its connection."""
    ready, _, _ = select.select([near, far], [], [])
    return far in ready and not far.recv(1, socket.MSG_PEEK)


def _abort(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _answer(code: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (code, len(body), body)


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
