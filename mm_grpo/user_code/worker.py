"""Code of a worker process: a handler of user code that is made once, and its calls, one by one.

Both directions carry frames: 8 bytes of length, then as many bytes. Requests are pickled by the trainer. Answers are
made by this package, JSON and pixels, so that nothing that user code makes reaches pickle.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

from mm_grpo.errors import UserError
from mm_grpo.import_path import digest_of

LENGTH = struct.Struct("!Q")
Handler = Callable[[bytes], bytes]
"""Function from the frame of a call to the frame of its answer."""


def serve(connection: socket.socket, make: Callable[[Any], Handler]) -> NoReturn:
    """Make the handler from the first frame, then answer until the trainer closes the connection.

    Reply to the first frame with an empty frame on success, the error otherwise.
    """
    requests = connection.makefile("rb")
    environment, folder, sys.path[:], load = pickle.loads(_receive(requests))
    os.environ.clear()
    os.environ.update(environment)
    with suppress(OSError):
        os.chdir(folder)
    importlib.invalidate_caches()
    try:
        handler = make(pickle.loads(load))
    except BaseException as error:
        try:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        except Exception:
            why = type(error).__name__
        _send(connection, why.encode("utf-8", "replace"))
        _end()
    _send(connection, b"")
    while True:
        _send(connection, handler(_receive(requests)))


def require_unchanged(address: str, digest: str | None) -> None:
    """Raise RuntimeError if the file of an address has changed since the trainer imported it (by its SHA-256)."""
    if digest_of(address) != digest:
        place = address.rpartition(":")[0]
        raise RuntimeError(f"the file has changed since the trainer loaded it ({place}); start the run again")


def _send(connection: socket.socket, body: bytes) -> None:
    try:
        connection.sendall(LENGTH.pack(len(body)) + body)  # at once: each part wakes the trainer
    except OSError:
        _end()


def _receive(requests: BinaryIO) -> bytes:
    (length,) = LENGTH.unpack(_receive_exactly(requests, LENGTH.size))
    return _receive_exactly(requests, length)


def _receive_exactly(requests: BinaryIO, length: int) -> bytes:
    body = b""
    with suppress(OSError):
        body = requests.read(length)
    if len(body) < length:
        _end()
    return body


def _end() -> NoReturn:
    """Kill this process's session: the trainer has ended, or closed the connection."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
