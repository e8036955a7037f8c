"""The process that forks workers and ends their sessions: a program without torch, without threads and without the
user's script, so that a fork of it is sound, and takes 0.02 s where an interpreter takes 0.3 s.

The trainer holds a `Lifeline` of each worker. When it lets go of it, or ends, were it by SIGKILL, the server kills the
worker's session with all that was started in it; when the worker ends first, the server does the same and says how.
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
"""What a lifeline says so that its session is left alone."""
END_LIMIT = 5.0
"""Seconds that the end of a session may take."""


def ended(code: int) -> str:
    """How a process ended, by its exit code, for a message."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name} (out of memory?)" if -code == signal.SIGKILL else f"was ended by {name}"


def search_path() -> list[str]:
    """`sys.path` for a helper process: nothing of the working folder comes before the standard library."""
    return library_first(sys.path, _FOLDER)


class Lifeline:
    """The trainer's hold on the session of a process.

    That is a fork of the server, which calls `target` ("module:function") with `connection`, or the process `pid`.
    """

    def __init__(
        self, target: str = "", connection: socket.socket | None = None, pid: int | None = None
    ) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner = os.getpid()
        passed = [theirs, connection] if connection is not None else [theirs]
        with theirs:
            _ask({"target": target, "pid": pid}, passed)
        weakref.finalize(self, _let_go, self.socket, self.owner)

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """The exit code of a fork that has ended within `seconds`, None of one that has not."""
        self.socket.settimeout(seconds)
        try:
            return int(self.socket.recv(100) or -signal.SIGKILL)  # nothing: somebody killed the server
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:
            return -signal.SIGKILL

    def end(self) -> int | None:
        """Kill the session; the exit code of a fork. Does nothing in a fork of the trainer."""
        if os.getpid() != self.owner or self.socket.fileno() < 0:
            return None
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        code = self.exit_code(END_LIMIT)
        self.socket.close()
        return code

    def leave(self) -> None:
        """Let go of the session without ending it."""
        with suppress(OSError):
            self.socket.send(LEAVE)
        self.socket.close()


def _let_go(held: socket.socket, owner: int) -> None:
    if os.getpid() == owner and held.fileno() >= 0:
        with suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)  # a fork of this process may have it too
    held.close()


# the server, as the trainer sees it ------------------------------------------------------------


class _Server:
    """The server of this process, which starts when it is first asked, and anew where somebody killed it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path[:] = {search_path()!r}; from mm_grpo.user_code import server; "
        with theirs:
            self.process = subprocess.Popen(
                # -P: it imports nothing from the working folder, where a json.py may stand
                [sys.executable, "-P", "-c", f"{code}server.main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what is sent to the trainer's group does not end it
            )
        self.socket, self.owner = ours, os.getpid()


_lock = threading.Lock()
_server: _Server | None = None
_FOLDER = working_folder() or ""


def _ask(request: dict[str, Any], passed: list[socket.socket]) -> None:
    global _server
    message, numbers = [json.dumps(request).encode()], [each.fileno() for each in passed]
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
    """Serve the trainer that holds the other end of the socket of that number, until it has ended."""
    os.dup2(2, 1)  # what workers print goes to the trainer's standard error
    signal.signal(signal.SIGCHLD, lambda *_: None)
    serving = _Serving(socket.socket(fileno=number))
    while serving.answer():
        serving.reap()


class _Serving:
    """What the server holds: by lifeline the process, and whether it is a fork of the server."""

    def __init__(self, asked: socket.socket) -> None:
        self.asked, self.held = asked, dict[socket.socket, tuple[int, bool]]()
        self.woken, self.waker = socket.socketpair()
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno())
        self.selector = selectors.DefaultSelector()
        for each in (self.asked, self.woken):
            self.selector.register(each, selectors.EVENT_READ)

    def answer(self) -> bool:
        """Wait for requests and for the ends of lifelines and of forks; False when the trainer has ended."""
        for key, _ in self.selector.select():
            one: Any = key.fileobj
            if one is self.woken:
                one.recv(100)
            elif one is not self.asked:
                self._let_go(one)
            elif not self._begin():
                for pid, _ in self.held.values():
                    _kill(pid)
                return False
        return True

    def reap(self) -> None:
        """End the sessions of forks that have ended, and say how they did."""
        for lifeline, (pid, forked) in list(self.held.items()):
            # as a zombie it keeps its number, which is no other session's then
            if forked and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill(pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):
                    lifeline.send(str(code).encode())
                self._forget(lifeline)

    def _let_go(self, lifeline: socket.socket) -> None:
        pid, forked = self.held[lifeline]
        left = lifeline.recv(len(LEAVE)) == LEAVE
        if not left:
            _kill(pid)
        if left or not forked:
            self._forget(lifeline)
        else:  # until it has ended
            self.selector.unregister(lifeline)

    def _forget(self, lifeline: socket.socket) -> None:
        if lifeline in self.selector.get_map():
            self.selector.unregister(lifeline)
        del self.held[lifeline]
        lifeline.close()

    def _begin(self) -> bool:
        message, numbers, _, _ = socket.recv_fds(self.asked, 1 << 16, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        request, lifeline = json.loads(message), socket.socket(fileno=numbers[0])
        pid = request["pid"]
        if forked := pid is None:
            ours = [self.asked, self.woken, self.waker, lifeline, *self.held]
            with socket.socket(fileno=numbers[1]) as connection:
                pid = _fork(request["target"], connection, ours)
        self.held[lifeline] = pid, forked
        self.selector.register(lifeline, selectors.EVENT_READ)
        return True


def _kill(pid: int) -> None:
    for kill in (os.kill, os.killpg):  # a fork may not have a session of its own yet
        with suppress(OSError):
            kill(pid, signal.SIGKILL)


def _fork(target: str, connection: socket.socket, ours: list[socket.socket]) -> int:
    """A fork in a session of its own, which the kernel kills with the server. Its number."""
    module, _, name = target.partition(":")
    with suppress(Exception):  # here, so that it is imported once; the fork says what is wrong
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
            for each in ours:
                each.close()
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout = ignore_closed_pipe(sys.stdout)
                sys.stdout.reconfigure(line_buffering=True)
            worker.serve(connection, getattr(importlib.import_module(module), name))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
