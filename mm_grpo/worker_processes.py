"""Worker processes for user code, which can be killed at once and with the processes that they started.

`WorkerProcess` is forked from a fork server of our own, a process without torch and without threads; the user's script
is not imported into it. `detach` makes a new one a session of its own, and a `Guard` ends such sessions when the
trainer is killed. What a worker does is its user's affair: rewards (rewards/worker.py), tools and environments
(environments/worker.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver, popen_forkserver, spawn, util
from multiprocessing.context import ForkServerProcess
from types import FunctionType, SimpleNamespace
from typing import Any

from mm_grpo.import_path import library_first

START_LIMIT = 120.0
"""Seconds that a worker may take to start and to import what it runs."""
PR_SET_PDEATHSIG = 1


def default_size() -> int:
    """The processor cores that this process may use, shared with the other ranks of this machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdigit() else 1))


def ended(code: int) -> str:
    """How a worker ended, by its exit code, for a message."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name} (out of memory?)" if -code == signal.SIGKILL else f"was ended by {name}"


def _preparation_data(name: str) -> dict[str, Any]:
    data = spawn.get_preparation_data(name)
    data["sys_path"] = library_first(data["sys_path"], data["orig_dir"])
    return {key: value for key, value in data.items() if not key.startswith("init_main")}


def _start_server(executable: Any, arguments: list[str], descriptors: list[int]) -> int:
    *options, command = arguments
    path = f"import sys; sys.path[:] = {_preparation_data('')['sys_path']!r}; "
    return util.spawnv_passfds(executable, [*options, path + command], descriptors)


class _Server(forkserver.ForkServer):
    """Python's own, which imports nothing from the working folder in the place of the standard library."""

    _ensure_running = FunctionType(
        forkserver.ForkServer.ensure_running.__code__,
        {**vars(forkserver), "util": SimpleNamespace(**{**vars(util), "spawnv_passfds": _start_server})},
    )

    def ensure_running(self) -> None:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"  # for the resource tracker too, which may be started with it
        try:
            self._ensure_running()
        finally:
            if before is None:
                del os.environ["PYTHONSAFEPATH"]
            else:
                os.environ["PYTHONSAFEPATH"] = before


_PRELOAD = [__name__]
_SERVER = _Server()  # of our own: what Python's has imported is the user's affair
_SERVER.set_forkserver_preload(_PRELOAD)
_NAMES = {
    "forkserver": SimpleNamespace(
        connect_to_new_process=_SERVER.connect_to_new_process, read_signed=forkserver.read_signed
    ),
    "spawn": SimpleNamespace(get_preparation_data=_preparation_data),
}


def preload(module: str) -> None:
    """Have the fork server import a module, so that workers need not; without effect once it runs."""
    if module not in _PRELOAD:
        _PRELOAD.append(module)
        _SERVER.set_forkserver_preload(list(_PRELOAD))


class _Popen(popen_forkserver.Popen):
    """Python's own, but with our server, and without importing the trainer's script into the worker."""

    _launch = FunctionType(
        vars(popen_forkserver.Popen)["_launch"].__code__, {**vars(popen_forkserver), **_NAMES}
    )


class WorkerProcess(ForkServerProcess):
    """A process that `terminate` ends at once, with all that it started in its session."""

    _Popen = _Popen

    def terminate(self) -> None:
        if os.getpid() == getattr(self, "_parent_pid", None):  # not in a fork of the trainer
            self._kill(os.kill)  # it may not have a session of its own yet
            self._kill(os.killpg)

    def _kill(self, kill: Callable[[int, int], None]) -> None:
        if self.pid is not None:
            with suppress(OSError):
                kill(self.pid, signal.SIGKILL)


def detach(environment: Mapping[str, str]) -> None:
    """Make this process a worker, with these environment variables: in a session of its own, so that it can be killed
    with what it starts. The kernel kills it with the fork server, and that ends with the trainer. What it prints goes
    to the trainer's standard error."""
    parent = os.getppid()
    os.setsid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # the server ends when nobody holds this: with the trainer alone
    server.__init__()
    for number in (signal.SIGINT, signal.SIGTERM):  # handlers of a pool are not for the user's functions
        signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)


class Guard:
    """A process that ends the sessions of workers when this one has ended, were it by SIGKILL.

    The kernel ends a worker by itself then, but not what the worker started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = WorkerProcess(target=_guard, args=(theirs,), daemon=True)
        with theirs:
            self.process.start()
        self._connection = ours

    def watch(self, pid: int, sign: str = "+") -> None:
        """Have the session of a worker ended, or with the sign `-` leave it, for it has ended."""
        with suppress(OSError):  # somebody killed the guard; workers end without it
            self._connection.sendall(f"{sign}{pid}\n".encode())

    def close(self) -> None:
        """End the guard, and the sessions that it watches."""
        self._connection.close()
        self.process.join(5.0)
        self.process.terminate()


def _guard(connection: socket.socket) -> None:
    os.setsid()
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # as in `detach`
    watched: set[int] = set()
    with connection.makefile() as lines:
        for line in lines:
            if line[0] == "+":
                watched.add(int(line[1:]))
            else:
                watched.discard(int(line[1:]))
    for pid in watched:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)
