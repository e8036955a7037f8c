"""The worker processes of one isolated reward, as pebble runs them, and what became of them.

Which calls they get is isolation.py's affair; what runs in them is worker.py.
"""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

import pebble.pool.process
from pebble import ProcessPool

from mm_grpo.errors import RewardError
from mm_grpo.import_path import digest_of
from mm_grpo.rewards import worker
from mm_grpo.rewards.resolve import address_of
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.worker_processes import START_LIMIT, Guard, WorkerProcess, ended, preload

# pebble measures by the wall clock, and would end every call when that is set forward
pebble.pool.process.time = SimpleNamespace(time=time.monotonic, sleep=time.sleep)  # type: ignore[attr-defined,assignment]

EXITED_WITH_0 = 256
"""What pebble is given as the exit code of a worker that exited with 0, which it would not report."""

preload(__name__)


class PebbleProcess(WorkerProcess):
    """A worker as pebble handles it: its death is always seen, and what it has started ends with the trainer."""

    _seen_dead = False
    guard: Guard | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "guard": None}  # the worker is sent this object

    def start(self) -> None:
        super().start()
        if self.guard is not None:
            self.guard.watch(self.pid or 0)

    def terminate(self) -> None:
        self._seen_dead = self._seen_dead or os.getpid() == getattr(self, "_parent_pid", None)
        super().terminate()

    def is_alive(self) -> bool:
        if super().is_alive():
            return True
        self._kill(os.killpg)
        if self.guard is not None:
            self.guard.watch(self.pid or 0, "-")
        # Pebble drops a death whose task it has not seen begin; until its next look, in 0.1 s, it will have.
        self._seen_dead, seen = True, self._seen_dead
        return not seen

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return EXITED_WITH_0 if code == 0 else code


class _Context(ForkServerContext):
    """The multiprocessing context of one pool; `processes` are the workers that it has started."""

    def __init__(self) -> None:
        self.processes: list[PebbleProcess] = []
        self.guard = Guard()

    def Process(self, *args: Any, **kwargs: Any) -> PebbleProcess:  # type: ignore[override]
        self.processes.append(PebbleProcess(*args, **kwargs))
        self.processes[-1].guard = self.guard
        return self.processes[-1]

    def last_exit(self) -> int:
        """The exit code of the latest worker that has ended."""
        return next((p.exitcode for p in reversed(self.processes) if p.exitcode is not None), EXITED_WITH_0)


def how_it_ended(code: int) -> str:
    """How a worker ended, for a message."""
    return ended(code % EXITED_WITH_0 if code >= 0 else code)


class Workers:
    """The `count` worker processes of one reward. They start at once; `ready` has a result when one of them has
    imported the function."""

    def __init__(self, spec: RewardSpec, count: int) -> None:
        self.spec, self.count, self.busy = spec, count, 0
        load = worker.Load(
            address_of(spec),
            dict(spec.made_with),
            digest_of(address_of(spec)),
            spec.kind,
            spec.options.memory_limit,
            spec.options.per_turn,
        )
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many workers as cores compute at once
        self.context = _Context()
        self.pool = ProcessPool(
            count, initializer=worker.start, initargs=(load, environment), context=self.context
        )
        self.ready = self.pool.schedule(worker.ready)

    def check(self) -> None:
        """Wait until a worker has imported the function; RewardError when none can."""
        name, address = self.spec.name, address_of(self.spec)
        try:
            fault = self.ready.result(START_LIMIT)
        except TimeoutError:
            words = f"has not imported {address} within {START_LIMIT:g} s"
        except Exception:
            ended = how_it_ended(self.context.last_exit())
            words = f"{ended} while it started or imported {address}; what it wrote stands above"
        else:
            if not fault:
                return
            words = f"cannot import {address}: {fault}"
        raise RewardError(f"reward {name!r}: a worker process {words}")

    def stop(self) -> threading.Thread:
        """Kill the workers, in a thread that waits for pebble's own."""
        self.pool.stop()  # type: ignore[no-untyped-call]
        thread = threading.Thread(target=self._join, daemon=True)
        thread.start()
        return thread

    def _join(self) -> None:
        self.pool.join()
        self.context.guard.close()
