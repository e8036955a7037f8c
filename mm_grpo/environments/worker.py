"""Worker processes of tools and environments: conversations by number, and their calls one by one.

Both directions carry frames: 8 bytes of length, then so many. What comes in was pickled by the trainer. What goes out
is an `Answer` as JSON and the pixels of its images, so that nothing that a tool makes reaches pickle.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from PIL import Image

from mm_grpo.environments.factories import adapter_of
from mm_grpo.environments.observation import LONGEST_TEXT, Limits, Observation, checked, described, failed
from mm_grpo.environments.session import Answer, Session
from mm_grpo.errors import ToolError
from mm_grpo.import_path import digest_of, load_file, load_module
from mm_grpo.rewards.user_code import own_copy
from mm_grpo.worker_processes import detach

LENGTH = struct.Struct("!Q")
HEADER = struct.Struct("!I")
OVERHEAD = 2**20
"""Bytes of a frame besides text and pixels."""


@dataclass(frozen=True)
class Load:
    """Imports of a worker: functions and factories by name, at `file.py:name`, `module:name` or the name of an
    adapter, with the SHA-256 of the file as the trainer imported it; and the limits on what they answer."""

    functions: Mapping[str, tuple[str, str | None]]
    factories: Mapping[str, tuple[str, str | None]]
    limits: Limits


def serve(connection: socket.socket, load: Load, environment: Mapping[str, str]) -> None:
    """Import what `load` names, say so in one frame, and answer until the trainer closes the connection."""
    detach(environment)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    connection.setblocking(True)
    try:
        functions = {name: _loaded(*at) for name, at in load.functions.items()}
        factories = {name: _loaded(*at) for name, at in load.factories.items()}
    except BaseException as error:
        _send(connection, (str(error) if isinstance(error, ToolError) else described(error)).encode())
        _end()
    _send(connection, b"")
    sessions: dict[int, Session] = {}
    rows: dict[int, Any] = {}
    while True:
        body = _received(connection)
        try:
            number, what, name, row, packed = pickle.loads(body)
            arguments = _row(rows, row, packed) if row is not None else pickle.loads(packed)
        except Exception as error:
            answer = Answer(raised=f"cannot be made in a worker process: {described(error)}")
        else:
            if number not in sessions:
                sessions[number] = Session(functions, factories, load.limits)
            answer = sessions[number].answer(what, name, arguments)
            if what == "close" or answer.gone is not None:
                del sessions[number]
        _send(connection, packed_answer(answer, load.limits))


def _row(rows: dict[int, Any], row: tuple[int, bool], packed: bytes) -> Any:
    """A copy of a row that several conversations may begin with; its images share their pixels until one is changed."""
    number, first = row
    if first:
        rows.clear()
    if number not in rows:
        rows[number] = pickle.loads(packed)
    return own_copy(rows[number])


def packed_answer(answer: Answer, limits: Limits) -> bytes:
    """An answer as a worker sends it."""
    seen = answer.observation
    header = {
        "parts": None if seen is None else [p if isinstance(p, str) else p.size for p in seen.parts],
        "fault": None if seen is None else seen.fault,
        "reward": answer.reward,
        "done": answer.done,
        "raised": answer.raised,
        "late": answer.late,
        "gone": answer.gone,
    }
    text = json.dumps(header, ensure_ascii=False).encode()
    if len(text) > 4 * LONGEST_TEXT + OVERHEAD:
        return packed_answer(Answer(failed("bad_result", "the answer has too many parts")), limits)
    return b"".join(
        [HEADER.pack(len(text)), text, *(i.tobytes() for i in (() if seen is None else seen.images))]
    )


def unpacked_answer(body: bytes, limits: Limits) -> Answer:
    """The answer that a worker sent. ValueError for what is none."""
    try:
        (size,) = HEADER.unpack_from(body)
        at = HEADER.size + size
        given = json.loads(body[HEADER.size : at])
        parts: list[str | Image.Image] = []
        for part in given["parts"] or ():
            if not isinstance(part, str):
                width, height = map(int, part)
                if not 0 < width * height <= limits.max_pixels:
                    raise ValueError(f"an image of {width} × {height} pixels")
                part = Image.frombytes("RGB", (width, height), body[at : at + 3 * width * height])
                at += 3 * width * height
            parts.append(part)
        if at != len(body):
            raise ValueError(f"{len(body) - at} bytes too many")
        seen = None
        if given["parts"] is not None:
            seen = checked(Observation(tuple(parts), given["fault"]), limits)
        late = given["late"] is True
        return Answer(seen, given["reward"], given["done"] is True, given["raised"], late, gone=given["gone"])
    except (KeyError, TypeError, IndexError, struct.error) as error:
        raise ValueError(str(error)) from error


def most_bytes(limits: Limits) -> int:
    """The longest frame of an answer."""
    return 4 * LONGEST_TEXT + limits.all_bytes + 2 * OVERHEAD


def _loaded(address: str, digest: str | None) -> Callable[..., Any]:
    if (adapter := adapter_of(address)) is not None:
        return adapter
    place, _, name = address.rpartition(":")
    load = load_file if place.endswith(".py") else load_module
    module = load(address, place, ToolError)
    if digest_of(address) != digest:
        raise ToolError(f"{place} has changed since the trainer loaded it; start the run again")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _send(connection: socket.socket, body: bytes) -> None:
    try:
        connection.sendall(LENGTH.pack(len(body)))
        connection.sendall(body)
    except OSError:
        _end()


def _received(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    body = bytearray(length)
    view: Sequence[int] | memoryview = memoryview(body)
    at = 0
    while at < length:
        try:
            got = connection.recv_into(view[at:])  # type: ignore[arg-type]
        except OSError:
            got = 0
        if not got:
            _end()
        at += got
    return bytes(body)


def _end() -> NoReturn:
    """End this process with all that it started: the trainer has ended, or let go of it."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
