"""Python programs that start in milliseconds: forks of a process that has done the imports.

`start(["script.py", "argument"], ...)` runs what `python script.py argument` would, without the five seconds
that torch, transformers and deepspeed take to import. `-m MODULE` and `-c CODE` work too. The server is a
process of its own: it never runs a tensor operation, starts no thread and is in no process group, so that a
fork of it is a sound start. It ends with the process that started it, and its children with it.

What differs from a fresh interpreter: warnings of imports are not seen, hashes of strings are equal in all
children, and variables that are read while torch or deepspeed load (OMP_NUM_THREADS, DS_ACCELERATOR) have
the server's values. The tests of launchers start fresh interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
MESSAGE = 1 << 18
"""Bytes that a request (arguments and environment) may have."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATIENCE = 180.0
"""Seconds that the server may take to import and to fork."""
PRELOAD = (
    "torch",
    "transformers",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by deepspeed.initialize, and torch's compiler by it
    "peft",
    "accelerate",
    *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
    *(f"transformers.models.{name}.processing_{name}" for name in FAMILIES),
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.video_processing_auto",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl",
    "transformers.tokenization_mistral_common",
    "mm_grpo.cli.main",
    "mm_grpo.trainer",
    "mm_grpo.learner.zero",
)
"""What a rank imports. Not datasets: pyarrow starts a thread, and a fork of a process with threads is unsafe."""
VLLM = ("vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "mm_grpo.rollout.vllm.engine")
"""What an engine imports: to be named as `preload`, so that a session without vLLM tests does not wait for it."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONPATH": str(ROOT),
    "VLLM_LOGGING_LEVEL": "ERROR",  # as mm_grpo sets it before it imports vllm
}


class Forked:
    """A process that the server forked, with the part of subprocess.Popen's interface that tests need."""

    def __init__(self, channel: socket.socket, arguments: Sequence[str]) -> None:
        self.channel = channel
        self.args = arguments
        self.returncode: int | None = None
        channel.settimeout(PATIENCE)
        self.pid = self._answer()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = PATIENCE) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.channel.settimeout(timeout)
            try:
                self.returncode = self._answer()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self.channel.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """By way of the server, which knows whether the process id is still this process's."""
        self._tell(str(int(number)))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, if it still runs, and those that it has started."""
        self._tell("end")
        self.wait(30)

    def _answer(self) -> int:
        answer = self.channel.recv(100)
        if not answer:
            raise RuntimeError(f"the fork server has ended with {_server()[0].wait(30)}")
        return int(answer)

    def _tell(self, word: str) -> None:
        if self.poll() is None:
            with contextlib.suppress(BrokenPipeError):  # it has ended in this moment
                self.channel.send(word.encode())


def start(
    arguments: Sequence[object],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[Any],
    stderr: IO[Any],
    preload: Sequence[str] = (),
) -> Forked:
    """Run `python ARGUMENTS` in a fork of the server, in a process group of its own. `preload` are modules that the
    server imports before, once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    job = {"arguments": list(map(str, arguments)), "env": dict(env), "cwd": str(cwd), "preload": preload}
    message = json.dumps(job).encode()
    assert len(message) <= MESSAGE
    with theirs, contextlib.suppress(BrokenPipeError):  # the answer, which does not come, is an error then
        socket.send_fds(_server()[1], [message], [theirs.fileno(), stdout.fileno(), stderr.fileno()])
    return Forked(ours, job["arguments"])


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The server, which is started by the first use and ends when its socket closes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**env, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        server.wait(30)

    atexit.register(end)
    return server, ours


@functools.cache
def preload(*names: str) -> dict[str, str]:
    """Import modules; the environment variables that they set."""
    before = dict(os.environ)
    for name in names:
        # an older version may not have it, or need what is not installed
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{names}: an import has started {len(threads) - 1} threads"
    gc.freeze()  # the collector would write to pages that the children share
    return {k: v for k, v in os.environ.items() if before.get(k) != v}


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:  # noqa: C901
    """Fork for every request. Returns None in the server, at its end, and the request in each child."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    running: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                data, fds, _, _ = socket.recv_fds(control, MESSAGE, 3)
                if not data:
                    for pid in running.values():
                        os.killpg(pid, signal.SIGKILL)
                    return None
                job = json.loads(data)
                job["env"] |= preload(*PRELOAD) | preload(*job["preload"])
                pid = os.fork()
                if pid == 0:
                    for each in list(selector.get_map().values()):
                        os.close(each.fd) if isinstance(each.fileobj, int) else each.fileobj.close()
                    selector.close()
                    os.close(fds[0])
                    return job, fds[1:]
                os.setpgid(pid, pid)
                channel = socket.socket(fileno=fds[0])
                running[channel] = pid
                channel.send(str(pid).encode())
                selector.register(channel, selectors.EVENT_READ)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, channel)
                for fd in fds[1:]:
                    os.close(fd)
            elif isinstance(key.fileobj, int):  # a child has ended
                channel, pid = key.data, running.pop(key.data)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                if channel.fileno() >= 0:
                    selector.unregister(channel)
                    with contextlib.suppress(OSError):  # nobody waits for it any more
                        channel.send(str(code).encode())
                    channel.close()
            elif key.fileobj in running:  # a signal to send, or the end of who waits for the child
                word = key.fileobj.recv(100)
                if not word:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                if word in (b"", b"end"):
                    os.killpg(running[key.fileobj], signal.SIGKILL)
                else:
                    os.kill(running[key.fileobj], int(word))


def become(job: dict[str, Any], stdout: int, stderr: int) -> NoReturn:
    """Turn this fork into the program of `job`, and end as an interpreter ends. All but the freeing of every module,
    which takes longer than a small program."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    gc.enable()
    tempfile.tempdir = None  # TMPDIR may differ
    sys.modules["numpy"].random.seed()  # the other generators are seeded anew by a fork, or by constants
    code: object = 0
    try:
        run(job["arguments"], job["env"].get("PYTHONPATH", ""), job["cwd"])
    except SystemExit as leaving:
        code = leaving.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str], path: str, cwd: str) -> None:
    """What `python ARGUMENTS` runs, with `path` for PYTHONPATH."""
    first, *rest = arguments
    known = [p for p in path.split(os.pathsep) if p]
    sys.path[:] = known + [p for p in sys.path if p not in known]
    if first == "-m":
        sys.path.insert(0, cwd)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def main(fd: int) -> None:
    sys.path[:] = [p for p in sys.path if p != str(Path(__file__).parent)]
    gc.disable()  # what is imported stays
    preload(*PRELOAD)
    # as in conftest.py: each config that is read would be formatted for a log line
    sys.modules["transformers"].PretrainedConfig.__repr__ = object.__repr__
    job = serve(socket.socket(fileno=fd))
    if job is not None:
        become(job[0], *job[1])


if __name__ == "__main__":
    main(int(sys.argv[1]))
