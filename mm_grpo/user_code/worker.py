"""What runs in a worker process: something of the user's that is made once, and its calls, one by one.

Both directions carry frames: 8 bytes of length, then so many. What comes in was pickled by the trainer. What goes out
is made by this package alone, JSON and pixels, so that nothing that user code makes reaches pickle.
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
from typing import Any, NoReturn

from mm_grpo.errors import UserError
from mm_grpo.import_path import digest_of

LENGTH = struct.Struct("!Q")
Handler = Callable[[bytes], bytes]
"""Makes the call that a frame asks for; the frame of its answer."""


def serve(connection: socket.socket, make: Callable[[Any], Handler]) -> NoReturn:
    """Make the handler that the first frame asks for, say in one frame why it cannot be made or in an empty one that it
    is there, and answer until the trainer closes the connection."""
    environment, folder, sys.path[:], load = pickle.loads(_received(connection))
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
        _send(connection, handler(_received(connection)))


def require_unchanged(address: str, digest: str | None) -> None:
    """RuntimeError where the file of an address has another SHA-256 than when the trainer imported it."""
    if digest_of(address) != digest:
        place = address.rpartition(":")[0]
        raise RuntimeError(f"the file has changed since the trainer loaded it ({place}); start the run again")


def _send(connection: socket.socket, body: bytes) -> None:
    try:
        connection.sendall(LENGTH.pack(len(body)) + body)  # at once: each part wakes the trainer
    except OSError:
        _end()


def _received(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    body = bytearray(length)
    view = memoryview(body)
    while view:
        try:
            got = connection.recv_into(view)
        except OSError:
            got = 0
        if not got:
            _end()
        view = view[got:]
    return bytes(body)


def _end() -> NoReturn:
    """End this process with all that it started: the trainer has ended, or let go of it."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
