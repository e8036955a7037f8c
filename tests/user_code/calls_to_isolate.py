"""What a worker process runs in the tests of the mechanism: a call does what its text says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time


def sockets() -> list[int]:
    """The sockets of this process: its connection with the trainer."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += [fd] if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") else []
    return found


def fork_holds_on() -> None:
    """A child that has the connection too, and the worker ends."""
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(4)


def writes(data: bytes) -> None:
    os.write(sockets()[0], data)
    time.sleep(1000)


def closes() -> None:
    for fd in sockets():
        os.close(fd)
    time.sleep(1000)


def starts_a_child() -> str:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    return f"{os.getpid()} {child.pid}"


CALLS = {
    "where": lambda: str(os.getpid()),
    "modules": lambda: " ".join(sorted({name.partition(".")[0] for name in sys.modules})),
    "environment": lambda: f"{os.environ['GIVEN']} {os.getcwd()} {sys.path[0]}",
    "main": lambda: str(threading.current_thread() is threading.main_thread()),
    "prints": lambda: print("a line") or str(os.write(1, b"another\n")) + sys.stdin.read(),
    "child": starts_a_child,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "fork holds on": fork_holds_on,
    "closes": closes,
    "huge answer": lambda: writes(b"\xff" * 9),
    "hang": lambda: time.sleep(1000),
    "hang in C": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "deaf": lambda: [signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(1000)],
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "half an answer": lambda: writes(b"\0\0\0\0\0\0\0\x09{"),
}


def make(load: str):
    """A handler, or what keeps it from being made."""
    if load == "raises":
        raise RuntimeError("no such thing")
    if load == "dies":
        os._exit(7)
    if load == "hangs":
        time.sleep(1000)

    def handler(body: bytes) -> bytes:
        if body.startswith(b"x"):
            return str(len(body)).encode()
        return CALLS[body.decode()]().encode()

    return handler
