"""What runs in the worker processes of isolated rewards: a function imported by its address, and its calls.

`isolation.py` starts the workers, each for one reward. What comes in is plain data that the trainer pickled. What
goes out is a text: the JSON of the answers. So nothing that a reward makes, neither its result nor its exception,
reaches pickle. What a function prints goes to the trainer's standard error.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.errors import RewardError
from mm_grpo.import_path import digest_of
from mm_grpo.rewards.call import fault_of
from mm_grpo.rewards.resolve import resolve_entry
from mm_grpo.rewards.scores import scores_of
from mm_grpo.rewards.spec import is_async
from mm_grpo.rewards.user_code import end_fork, own_copy
from mm_grpo.worker_processes import detach

LONGEST_TRACE = 20_000
"""Characters kept of an exception's traceback."""


@dataclass(frozen=True)
class Load:
    """The function that a worker imports, from `address`: `file.py:function` or `module:function`.

    `made_with` are the arguments of a class; `digest` is the SHA-256 of the file as the trainer imported it.
    `kind`, `memory_limit` and `per_turn` are the reward's.
    """

    address: str
    made_with: Mapping[str, Any]
    digest: str | None
    kind: Literal["completion", "batch"]
    memory_limit: int | None
    per_turn: bool = False


@dataclass(frozen=True)
class Job:
    """One call: how many completions it scores, its arguments, and which of `log_extra` and `log_metric` it takes."""

    rows: int
    arguments: Mapping[str, Any]
    logs: tuple[str, ...] = ()


class Worker:
    """The function of this process, or why it could not be imported."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.fn: Callable[..., Any] | None = None
        self.fault: str | None = None
        self.loop: Any = None
        try:
            self.fn = resolve_entry({"name": load.address, **load.made_with}).fn
            if digest_of(load.address) != load.digest:
                raise RuntimeError("the file has changed since the trainer loaded it; start the run again")
        except BaseException as error:
            known = isinstance(error, RewardError)  # its message is a sentence already
            self.fault = str(error) if known else f"{type(error).__name__}: {error}"

    def answer(self, job: Job) -> dict[str, Any]:
        """What became of a call: its checked `scores` and what it `logged`; or the exception that it `raised`; or
        why its answer is `refused`."""
        fn, limit = self.fn, self.load.memory_limit
        assert fn is not None
        # the rows of one message share what they have in common
        arguments: Mapping[str, Any] = own_copy(job.arguments, {})
        process = os.getpid()
        logged: list[tuple[str, str, Any]] = []
        try:
            with _memory(limit):
                answer = fn(**arguments, **_loggers(self.load.kind, job.logs, logged))
                if inspect.isawaitable(answer) and is_async(fn):
                    answer = self.awaited(answer)
        except BaseException as error:  # whatever it is, only this call has failed
            fault = fault_of(error, fn, __file__)
            what = fault.what
            if limit is not None and isinstance(error, MemoryError):
                what += f" (memory_limit is {limit} bytes)"
            return {"raised": [what, fault.file, fault.line, fault.trace[-LONGEST_TRACE:]]}
        finally:
            end_fork(process, "a reward")
        try:
            return {
                "scores": scores_of(answer, self.load.kind, job.rows, self.load.per_turn),
                "logged": logged,
            }
        except ValueError as error:
            return {"refused": str(error)}

    def awaited(self, answer: Any) -> Any:
        """The result of a coroutine."""
        import asyncio

        if self.loop is None:  # one for the worker's life: clients that rewards keep belong to it
            self.loop = asyncio.new_event_loop()

        async def waiting() -> Any:
            return await answer

        return self.loop.run_until_complete(waiting())


_worker: Worker | None = None


def start(load: Load, environment: Mapping[str, str]) -> None:
    """Make this process a worker."""
    global _worker
    detach(environment)
    _worker = Worker(load)


def ready() -> str:
    """Why the function could not be imported; an empty text if it was."""
    assert _worker is not None
    return _worker.fault or ""


def serve(body: bytes) -> str:
    """Make the calls of a pickled list of `Job`, in order; the JSON of their answers, or of one `fault` of all."""
    assert _worker is not None
    if _worker.fault is not None:
        return json.dumps({"fault": _worker.fault})
    try:
        jobs: Sequence[Job] = pickle.loads(body)
    except Exception as error:
        return json.dumps({"unreadable": f"{type(error).__name__}: {error}"})
    return "[" + ",".join(_json(_worker.answer(job)) for job in jobs) + "]"


def _json(answer: Mapping[str, Any]) -> str:
    try:
        return json.dumps(answer, default=_plain)
    except BaseException as error:  # only what a function logged can be so
        what = f"{type(error).__name__}: {error}, in what it gave to log_extra or log_metric"
        return json.dumps({"raised": [what, None, None, ""]})


def _plain(value: Any) -> Any:
    """A logged value that JSON does not know, as one that it does."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return repr(value)


def _loggers(kind: str, names: Sequence[str], logged: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """`log_extra` and `log_metric`, which only note what they get; the trainer checks and keeps it."""
    every = {
        "log_extra": lambda column, value: logged.append(
            ("extra", str(column), list(value) if kind == "batch" else [value])
        ),
        "log_metric": lambda name, value: logged.append(("metric", str(name), value)),
    }
    return {name: every[name] for name in names}


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
