"""One worker process as the trainer holds it: started, written to, read from, killed and reaped.

Nothing here waits for the worker: requests are buffered and written as far as the pipe takes them, and
answers are given as they come. `pool.py` decides who does what.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mm_grpo.rewards.worker import HEADER, Setup

PACKAGE_ROOT = str(Path(__file__).parents[2])


class Process:
    """A worker and what it is busy with.

    `chunk` are the numbers of the jobs that it has and has not answered, in their order, so that the
    first of them is the one it is at; `since` is when it began that one. `loading` are the functions it
    was told to import and has not answered for, `loaded` those it holds.
    """

    def __init__(self) -> None:
        self.loading: set[str] = set()
        self.loaded: set[str] = set()
        self.chunk: list[int] = []
        self.since = 0.0
        self.sent = 0.0
        self.shared = False
        """Whether the jobs behind the first were given to others too."""
        self.slow = False
        """Whether it was set back behind the others, for one call took long; that cannot be undone."""
        self.ended: str | None = None
        """How the process ended, in words, once it has."""
        self._reaped = False
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")  # as many workers as cores compute at once
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (PACKAGE_ROOT, before)))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "mm_grpo.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # its own process group: killed with its children, spared by Ctrl-C
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self.pid = self._popen.pid
        self.requests, self.answers = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.answers, False)
        with contextlib.suppress(OSError, AttributeError):  # 64 KiB by default: a wake-up for each of them
            fcntl.fcntl(self.requests, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._out, self._in = bytearray(), bytearray()
        # The kernel ends a worker with the thread that started it, so only the main one may ask for that.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        self.send(Setup(list(sys.path), before, parent))

    @property
    def idle(self) -> bool:
        return self.ended is None and not self.chunk and not self.loading

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def send(self, request: Any) -> None:
        """Queue a request and write what the pipe takes. TypeError and the like when it cannot be pickled."""
        body = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        self._out += HEADER.pack(len(body))
        self._out += body
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._out:
                with memoryview(self._out) as view:
                    written = os.write(self.requests, view)
                del self._out[:written]

    def receive(self) -> Iterator[dict[str, Any]]:
        """The answers that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.answers, 1 << 20):
                self._in += part
        start = 0
        while len(self._in) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._in, start)
            if len(self._in) - start < HEADER.size + size:
                break
            start += HEADER.size
            yield json.loads(self._in[start : start + size])
            start += size
        del self._in[:start]

    def poll(self) -> bool:
        """Whether the process has ended; `kill` reaps it."""
        if self.ended is None:
            try:
                found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self.ended, self._reaped = "ended, and another part of the program reaped it", True
            else:
                if found is not None:
                    code, exited = found.si_status, found.si_code == os.CLD_EXITED
                    self.ended = f"exited with code {code}" if exited else f"was ended by {_signal(code)}"
        return self.ended is not None

    def set_back(self) -> None:
        """Let every other process have the processor first."""
        if self.slow:
            return
        self.slow = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, 19)

    def leave(self) -> None:
        """Close the request pipe, at which an idle worker ends by itself."""
        with contextlib.suppress(OSError):
            assert self._popen.stdin is not None
            self._popen.stdin.close()

    def kill(self, patience: float = 0.0) -> None:
        """End the process and what it started, and reap it; first wait `patience` seconds for its own end."""
        end = time.monotonic() + patience
        while not self.poll() and time.monotonic() < end:
            time.sleep(0.005)
        # Before the process is reaped: until then nobody else can get the number of its group.
        if not self._reaped:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._reaped = True
        self.ended = self.ended or "was ended by the trainer"
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name
