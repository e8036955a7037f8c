"""The process that runs isolated rewards: `python -m mm_grpo.rewards.worker`, started by `pool.py`.

It imports functions by their address (`file.py:function` or `module:function`) and calls them one at a
time. Frames on its pipes are a length of 8 bytes and a body. What comes in is a pickled tuple of plain
data: `Setup` once, then `Load` and `Calls`. What goes out is JSON, one frame per call, so that nothing
that a reward makes is ever unpickled by the trainer. The function's own prints go to the trainer's
standard error.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from mm_grpo.rewards.checks import Fault, fault_of, scores_of

HEADER = struct.Struct("!Q")
LONGEST = 2000
"""Characters kept of an exception's message; ten times as many of its traceback."""


@dataclass(frozen=True)
class Setup:
    """What the worker takes over from the trainer's process: `parent` is that process's id, or None when
    the worker may outlive the thread that started it; `pythonpath` the variable as it was."""

    path: Sequence[str]
    pythonpath: str | None
    parent: int | None


@dataclass(frozen=True)
class Load:
    """Import the function at `address` and call it `key`. `made_with` are the arguments of a class;
    `digest` the SHA-256 of the file as the trainer loaded it."""

    key: str
    address: str
    made_with: Mapping[str, Any]
    digest: str | None


@dataclass(frozen=True)
class Job:
    """One call: its number in the step, the completions it scores, its arguments, and which of the logging
    functions it takes besides."""

    number: int
    rows: int
    arguments: Mapping[str, Any]
    logs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calls:
    """Call `key` for each job, in order."""

    key: str
    kind: Literal["completion", "batch"]
    memory_limit: int | None
    jobs: Sequence[Job]


@dataclass
class _Loaded:
    fn: Callable[..., Any]
    is_async: bool


@dataclass
class Worker:
    """The state of this process: its pipes and the functions it has imported."""

    requests: BinaryIO
    answers: BinaryIO
    functions: dict[str, _Loaded] = field(default_factory=dict)
    loop: Any = None

    def serve(self) -> None:
        """Answer until the trainer closes the pipe."""
        self.setup(self.read())
        while (request := self.read()) is not None:
            if isinstance(request, Load):
                self.load(request)
            elif isinstance(request, Calls):
                for job in request.jobs:
                    self.write({"job": job.number, **self.call(request, job)})

    def read(self) -> Any:
        header = self.requests.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        body = self.requests.read(HEADER.unpack(header)[0])
        try:
            return pickle.loads(body)
        except Exception as error:
            self.write({"unreadable": f"{type(error).__name__}: {error}"})
            return ()

    def write(self, answer: Mapping[str, Any]) -> None:
        try:
            body = json.dumps(answer, default=_plain).encode()
        except Exception as error:  # only what a function logged can be so
            what = f"{type(error).__name__}: {error}, in what it gave to log_extra or log_metric"
            body = json.dumps({"job": answer["job"], "raised": [what, None, None, ""]}).encode()
        self.answers.write(HEADER.pack(len(body)) + body)
        self.answers.flush()

    def setup(self, setup: Setup) -> None:
        sys.path[:] = setup.path
        if setup.pythonpath is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = setup.pythonpath
        if setup.parent is not None:
            _die_with(setup.parent)
        self.write({"ready": os.getpid()})

    def load(self, request: Load) -> None:
        from mm_grpo.rewards.places import digest_of
        from mm_grpo.rewards.registry import is_async
        from mm_grpo.rewards.resolve import resolve_entry

        try:
            fn = resolve_entry({"name": request.address, **request.made_with}).fn
            if digest_of(request.address) != request.digest:
                raise RuntimeError("the file has changed since the trainer loaded it; start the run again")
        except BaseException as error:
            self.write({"load": request.key, "fault": _words(error)})
        else:
            self.functions[request.key] = _Loaded(fn, is_async(fn))
            self.write({"load": request.key})

    def call(self, request: Calls, job: Job) -> dict[str, Any]:
        """The answer to one job: its checked scores and what it logged, or its fault."""
        loaded = self.functions[request.key]
        logged: list[tuple[str, str, Any]] = []
        arguments = {**job.arguments, **_loggers(request.kind, job.logs, logged)}
        try:
            with _memory(request.memory_limit):
                answer = loaded.fn(**arguments)
                if inspect.isawaitable(answer) and loaded.is_async:
                    answer = self._await(answer)
        except BaseException as error:  # whatever it is, only this call has failed
            fault = fault_of(error, loaded.fn, __file__)
            limit = request.memory_limit
            what = fault.what[:LONGEST]
            if limit is not None and isinstance(error, MemoryError):
                what += f" (memory_limit is {limit} bytes)"
            return {"raised": [what, fault.file, fault.line, fault.trace[-10 * LONGEST :]]}
        try:
            return {"scores": scores_of(answer, request.kind, job.rows), "logged": logged}
        except ValueError as error:
            return {"refused": str(error)}

    def _await(self, answer: Any) -> Any:
        import asyncio

        if self.loop is None:  # one for the worker's life: clients that rewards keep belong to it
            self.loop = asyncio.new_event_loop()

        async def waiting() -> Any:
            return await answer

        return self.loop.run_until_complete(waiting())


def fault_from(raised: Sequence[Any]) -> Fault:
    """The fault that a worker wrote."""
    what, file, line, trace = raised
    return Fault(str(what), file, line, str(trace))


def _loggers(kind: str, names: Sequence[str], logged: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """`log_extra` and `log_metric`, which only note what they get; the trainer checks and keeps it."""
    batch = kind == "batch"
    every = {
        "log_extra": lambda column, value: logged.append(
            ("extra", str(column), list(value) if batch else [value])
        ),
        "log_metric": lambda name, value: logged.append(("metric", str(name), value)),
    }
    return {name: every[name] for name in names}


def _plain(value: Any) -> Any:
    """What JSON does not know, for logged values."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return repr(value)


def _words(error: BaseException) -> str:
    """An exception in one line; our own errors are sentences already."""
    from mm_grpo.errors import RewardError

    return str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _memory(limit: int | None) -> Iterator[None]:
    """Let the process grow by `limit` bytes of address space at most; MemoryError beyond."""
    if limit is None:
        yield
        return
    import resource

    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = held + limit if hard == resource.RLIM_INFINITY else min(held + limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process with the trainer, even in the middle of a hanging call."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    # The pipes move away from 0 and 1, where a function's input() and print() would meet them.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    Worker(requests, answers).serve()


if __name__ == "__main__":
    # Pickle knows the records by this module's importable name, not as __main__.
    from mm_grpo.rewards.worker import main as serve

    serve()
