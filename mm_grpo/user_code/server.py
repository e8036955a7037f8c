"""Server process that forks workers and kills their sessions.

It has no torch, no threads and not the user's script, so that forking is safe and takes 0.02 s; starting an interpreter
takes 0.3 s. The trainer holds a `Lifeline` of each worker. When the trainer closes it or ends, even by SIGKILL, the
server kills the worker's session with everything started in it. When the worker ends first, the server does the same
and reports its exit code.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from typing import Any

from mm_grpo.import_path import library_first
from mm_grpo.terminal import ignore_closed_pipe
from mm_grpo.user_code import worker
from mm_grpo.user_code.kept_state import working_folder

PR_SET_PDEATHSIG = 1
LEAVE = b"leave"
"""Message of a lifeline before it closes without killing its session."""
END_LIMIT = 5.0
"""Seconds to wait for the end of a session."""


def ended(code: int) -> str:
    """Describe an exit code for a message."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name} (out of memory?)" if -code == signal.SIGKILL else f"was ended by {name}"


def search_path() -> list[str]:
    """Return `sys.path` for a helper process: the working folder never precedes the standard library."""
    return library_first(sys.path, _FOLDER)


class Lifeline:
    """The trainer's handle on the session of a process.

    The process is a fork of the server, which calls `target` ("module:function") with `connection`, or it is `pid`.
    """

    def __init__(
        self, target: str = "", connection: socket.socket | None = None, pid: int | None = None
    ) -> None:
        self.socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner = os.getpid()
        sockets = [server_end, connection] if connection is not None else [server_end]
        with server_end:
            _send_request({"target": target, "pid": pid}, sockets)
        weakref.finalize(self, _shut_down, self.socket, self.owner)

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Return the exit code of a fork; None if it has not ended within `seconds`."""
        self.socket.settimeout(seconds)
        try:
            return int(self.socket.recv(100) or -signal.SIGKILL)  # nothing: somebody killed the server
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:
            return -signal.SIGKILL

    def end(self) -> int | None:
        """Kill the session, and return the exit code of a fork. Do nothing in a fork of the trainer."""
        if os.getpid() != self.owner or self.socket.fileno() < 0:
            return None
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        code = self.exit_code(END_LIMIT)
        self.socket.close()
        return code

    def leave(self) -> None:
        """Close the lifeline without killing the session."""
        with suppress(OSError):
            self.socket.send(LEAVE)
        self.socket.close()


def _shut_down(lifeline: socket.socket, owner: int) -> None:
    if os.getpid() == owner and lifeline.fileno() >= 0:
        with suppress(OSError):  # close() is not enough: a fork of this process may hold it too
            lifeline.shutdown(socket.SHUT_RDWR)
    lifeline.close()


# the trainer's side of the server --------------------------------------------------------------


class _Server:
    """Server of this process. Started on first use; restarted if it was killed."""

    def __init__(self) -> None:
        self.socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner = os.getpid()
        code = f"import sys; sys.path[:] = {search_path()!r}; from mm_grpo.user_code import server; "
        with server_end:
            self.process = subprocess.Popen(
                # -P: it imports nothing from the working folder, which may hold a json.py
                [sys.executable, "-P", "-c", f"{code}server.main({server_end.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[server_end.fileno()],
                start_new_session=True,  # signals to the trainer's group do not end it
            )


_lock = threading.Lock()
_server: _Server | None = None
_FOLDER = working_folder() or ""


def _send_request(request: dict[str, Any], sockets: list[socket.socket]) -> None:
    global _server
    message, numbers = [json.dumps(request).encode()], [s.fileno() for s in sockets]
    with _lock:
        if _server is not None and _server.owner == os.getpid():
            with suppress(OSError):
                socket.send_fds(_server.socket, message, numbers)
                return
            _server.process.wait(END_LIMIT)
        _server = _Server()
        socket.send_fds(_server.socket, message, numbers)


# the server itself -----------------------------------------------------------------------------


def main(number: int) -> None:
    """Serve the trainer at the other end of the socket with that file number, until it ends."""
    os.dup2(2, 1)  # workers print to the trainer's standard error
    signal.signal(signal.SIGCHLD, lambda *_: None)
    serving = _Serving(socket.socket(fileno=number))
    while serving.answer():
        serving.reap()


class _Serving:
    """The server's processes: by lifeline the pid, and True for a fork of the server."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests, self.processes = requests, dict[socket.socket, tuple[int, bool]]()
        self.signals, self.waker = socket.socketpair()  # a signal (SIGCHLD) wakes the selector
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno())
        self.selector = selectors.DefaultSelector()
        for source in (self.requests, self.signals):
            self.selector.register(source, selectors.EVENT_READ)

    def answer(self) -> bool:
        """Wait for requests and for the ends of lifelines and forks. Return False when the trainer has ended."""
        for key, _ in self.selector.select():
            source: Any = key.fileobj
            if source is self.signals:
                source.recv(100)
            elif source is not self.requests:
                self._close(source)
            elif not self._begin():
                for pid, _ in self.processes.values():
                    _kill(pid)
                return False
        return True

    def reap(self) -> None:
        """Kill the sessions of forks that have ended, and report their exit codes."""
        for lifeline, (pid, forked) in list(self.processes.items()):
            # WNOWAIT: as a zombie it keeps its pid, so that no other session can have it when _kill runs
            if forked and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill(pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):
                    lifeline.send(str(code).encode())
                self._forget(lifeline)

    def _close(self, lifeline: socket.socket) -> None:
        pid, forked = self.processes[lifeline]
        leave = lifeline.recv(len(LEAVE)) == LEAVE
        if not leave:
            _kill(pid)
        if leave or not forked:
            self._forget(lifeline)
        else:  # `reap` forgets it when it has ended
            self.selector.unregister(lifeline)

    def _forget(self, lifeline: socket.socket) -> None:
        if lifeline in self.selector.get_map():
            self.selector.unregister(lifeline)
        del self.processes[lifeline]
        lifeline.close()

    def _begin(self) -> bool:
        message, numbers, _, _ = socket.recv_fds(self.requests, 1 << 16, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        request, lifeline = json.loads(message), socket.socket(fileno=numbers[0])
        pid = request["pid"]
        if forked := pid is None:
            sockets = [self.requests, self.signals, self.waker, lifeline, *self.processes]
            with socket.socket(fileno=numbers[1]) as connection:
                pid = _fork(request["target"], connection, sockets)
        self.processes[lifeline] = pid, forked
        self.selector.register(lifeline, selectors.EVENT_READ)
        return True


def _kill(pid: int) -> None:
    for kill in (os.kill, os.killpg):  # a fork may not have a session of its own yet
        with suppress(OSError):
            kill(pid, signal.SIGKILL)


def _fork(target: str, connection: socket.socket, sockets: list[socket.socket]) -> int:
    """Fork a worker in a new session, which the kernel kills with the server. Return its pid."""
    module, _, name = target.partition(":")
    with suppress(Exception):  # imported before the fork, so only once; the fork reports an error
        importlib.import_module(module)
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for server_socket in sockets:
                server_socket.close()
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout = ignore_closed_pipe(sys.stdout)
                sys.stdout.reconfigure(line_buffering=True)
            worker.serve(connection, getattr(importlib.import_module(module), name))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
