"""Tools and environments in worker processes: each call has a deadline, and a worker that hangs is killed.

A conversation stays in one worker; workers run in parallel. A worker that is late or dies is replaced. Its environments
are lost with it: `Host` masks their conversations or stops. Conversations without an environment go on.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.environments.factories import address_of
from mm_grpo.environments.host import Episode, Host, Task
from mm_grpo.environments.session import CallResult
from mm_grpo.environments.worker import ToolSources, unpack_result
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.import_path import digest_of
from mm_grpo.user_code.workers import Outcome, Unsendable, Worker, Workers, packed


@dataclass(eq=False)
class _Slot:
    """Place of one worker and its replacements, with its conversations."""

    worker: Worker | None = None
    conversations: int = 0
    environments: set[Episode] = field(default_factory=set)
    queue: deque[Task] = field(default_factory=deque)
    task: Task | None = None
    """The call that runs, or waits for the worker to start."""


class WorkerHost(Host):
    """Host that makes calls in `count` processes, which start when first needed and end with this one.

    `arguments` are those of `Host`. Raise ConfigError if other processes cannot import a tool or the environment.
    """

    def __init__(self, count: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.slots = [_Slot() for _ in range(count)]
        function_sources = {name: _source_of(function) for name, function in self.functions.items()}
        factory_source = None if self.factory is None else _source_of(self.factory)
        sources = ToolSources(function_sources, factory_source, self.video_limits)
        target = "mm_grpo.environments.worker:ToolWorker"
        self.workers = Workers(target, sources, "the tools of the run", _start_error)

    def begin(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            episode = task.episode
            if episode.place is None:
                episode.place = min(self.slots, key=lambda slot: slot.conversations)
                episode.place.conversations += 1
            episode.place.queue.append(task)
        self._poll(0.0)

    def work(self, wait: bool) -> None:
        if any(slot.task for slot in self.slots):
            self._poll(None if wait else 0.0)

    def abandon(self) -> None:
        for slot in self.slots:
            slot.queue.clear()
            if slot.task is not None:
                slot.task = None
                self._lose(slot, "the run was stopping")

    def forget(self, episode: Episode) -> None:
        if episode.place is not None:
            episode.place.conversations -= 1
            episode.place.environments.discard(episode)
        super().forget(episode)

    def end(self) -> None:
        for slot in self.slots:
            self._lose(slot, "the run was stopping")

    def _poll(self, seconds: float | None) -> None:
        """Receive answers for up to `seconds`, and hand out calls."""
        try:
            for outcome in self.workers.wait(seconds):
                self._receive(outcome)
            for slot in self.slots:
                self._dispatch(slot)
        except BaseException:  # a call that goes on would answer in place of the next one
            self.abandon()
            raise

    def _dispatch(self, slot: _Slot) -> None:
        """Send the slot's worker its next call, if it has none."""
        while slot.task is None and slot.queue:
            task = slot.queue.popleft()
            if self.due(task):
                slot.task = task
        if slot.task is not None:
            slot.worker = slot.worker or self.workers.start()
            if slot.worker.idle:
                task = slot.task
                if task.operation == "reset":
                    slot.environments.add(task.episode)
                call = pickle.dumps((task.episode.number, task.operation, task.name, _pack(task)))
                slot.worker.call(call, time.monotonic() + self.timeout)

    def _receive(self, outcome: Outcome) -> None:
        """Settle a call, or replace a worker that died without one."""
        slot = next(slot for slot in self.slots if slot.worker is outcome.worker)
        task, slot.task = slot.task, None
        if task is None:
            self._lose(slot, f"its worker process {outcome.died} while it waited for calls")
            return
        result = CallResult(died=outcome.died, late=outcome.late)
        if outcome.answer is not None:
            try:
                result = unpack_result(outcome.answer)
            except Exception as error:  # user code may have written it
                result = CallResult(died=f"sent what is no answer ({error})")
        if result.died is not None:
            self._lose(slot, f"its worker process {result.died} in {task} of {task.episode.uid}")
        elif outcome.late:
            late = f"had no answer after {self.timeout:g} s"
            self._lose(slot, f"its worker process was ended, for {task} of {task.episode.uid} {late}")
        elif task.operation == "close" or result.gone is not None:
            slot.environments.discard(task.episode)
        self.settle(task, result)

    def _lose(self, slot: _Slot, why: str) -> None:
        """End a worker; its environments are gone."""
        if slot.worker is not None:
            self.workers.end(slot.worker)
        slot.worker = None
        for episode in slot.environments:
            episode.lost = episode.lost or why
        slot.environments.clear()


def _start_error(how: str) -> ToolError:
    return ToolError(f"a worker process {how}; or set rollout.environment_workers=0")


def _source_of(code: Any) -> tuple[str, str | None]:
    """Return address and digest. Raise ConfigError if other processes cannot import it."""
    address = address_of(code)
    if address is None:
        name = getattr(code, "__qualname__", repr(code))
        raise ConfigError(
            f"rollout.environment_workers > 0: {name} cannot be imported by a worker process; put it into a file of "
            "its own, or set rollout.environment_workers=0"
        )
    return address, digest_of(address)


def _pack(task: Task) -> bytes:
    try:
        return packed(task.arguments)
    except Unsendable as error:
        raise ToolError(
            f"{task.episode.uid}: the column {error.name!r} cannot be sent to a worker process ({error.why}); set "
            "rollout.environment_workers=0"
        ) from None
