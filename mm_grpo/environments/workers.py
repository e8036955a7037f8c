"""Tools and environments in worker processes: a deadline for each call, and an end for what hangs or crashes.

A conversation stays in one worker; the workers work side by side. A worker whose call is late or that dies is ended,
and another one takes its place. With it go the environments that it held: `Host` says what becomes of their
conversations. Plain functions hold nothing, so that conversations without an environment go on.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.environments.factories import address_of
from mm_grpo.environments.host import Episode, Functions, Host, Task
from mm_grpo.environments.session import CallResult, Factory
from mm_grpo.environments.worker import ToolSources, unpacked_answer
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.import_path import digest_of
from mm_grpo.user_code.workers import LONGEST_ANSWER, Outcome, Unsendable, Worker, Workers, packed

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig


@dataclass(eq=False)
class _Slot:
    """A place for one worker after the other, with its conversations. `queue` are the calls that wait, `task` is the
    next or current one."""

    worker: Worker | None = None
    conversations: int = 0
    environments: set[Episode] = field(default_factory=set)
    queue: deque[Task] = field(default_factory=deque)
    task: Task | None = None


class WorkerHost(Host):
    """Calls tools and environments in `count` processes, which start when they are first needed and end with this one.
    ConfigError where another process cannot import one of them."""

    def __init__(
        self,
        config: GRPOConfig,
        functions: Functions,
        factory: Factory | None,
        scores: Collection[str] | None,
        count: int,
    ) -> None:
        super().__init__(config, functions, factory, scores)
        self.slots = [_Slot() for _ in range(count)]
        sources = ToolSources(
            {name: _located(function) for name, function in functions.items()},
            None if factory is None else _located(factory),
            self.limits,
        )
        target, most = "mm_grpo.environments.worker:ToolWorker", LONGEST_ANSWER
        self.workers = Workers(target, sources, "the tools of the run", _start_failed, most)

    def begin(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._slot_of(task.episode).queue.append(task)
        self._go_on(0.0)

    def work(self, wait: bool) -> None:
        if any(slot.task for slot in self.slots):
            self._go_on(None if wait else 0.0)

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

    def _go_on(self, seconds: float | None) -> None:
        """Take the answers that come within so many seconds, and hand out calls."""
        try:
            for outcome in self.workers.wait(seconds):
                self._take(outcome)
            for slot in self.slots:
                self._give(slot)
        except BaseException:  # a call that goes on would answer into the next one
            self.abandon()
            raise

    def _slot_of(self, episode: Episode) -> _Slot:
        if episode.place is None:
            episode.place = min(self.slots, key=lambda slot: slot.conversations)
            episode.place.conversations += 1
        found: _Slot = episode.place
        return found

    def _give(self, slot: _Slot) -> None:
        """Hand a worker without a call the next one that is to be made."""
        while slot.task is None and slot.queue:
            task = slot.queue.popleft()
            if self.due(task):
                slot.task = task
        if slot.task is not None:
            slot.worker = slot.worker or self.workers.start()
            if slot.worker.idle:
                task = slot.task
                if task.what == "reset":
                    slot.environments.add(task.episode)
                call = pickle.dumps((task.episode.number, task.what, task.name, _packed(task)))
                slot.worker.call(call, time.monotonic() + self.timeout)

    def _take(self, outcome: Outcome) -> None:
        """Note what came of a call, or that a worker without one has ended."""
        slot = next(slot for slot in self.slots if slot.worker is outcome.worker)
        task, slot.task = slot.task, None
        if task is None:
            self._lose(slot, f"its worker process {outcome.died} while it waited for calls")
            return
        result = CallResult(died=outcome.died, late=outcome.late)
        if outcome.answer is not None:
            try:
                result = unpacked_answer(outcome.answer, self.limits)
            except Exception as error:  # the user's code has written it
                result = CallResult(died=f"sent what is no answer ({error})")
        if result.died is not None:
            self._lose(slot, f"its worker process {result.died} in {task} of {task.episode.uid}")
        elif outcome.late:
            late = f"had no answer after {self.timeout:g} s"
            self._lose(slot, f"its worker process was ended, for {task} of {task.episode.uid} {late}")
        elif task.what == "close" or result.gone is not None:
            slot.environments.discard(task.episode)
        self.settle(task, result)

    def _lose(self, slot: _Slot, why: str) -> None:
        """End a worker; the environments that it held are gone."""
        if slot.worker is not None:
            self.workers.end(slot.worker)
        slot.worker = None
        for episode in slot.environments:
            episode.lost = episode.lost or why
        slot.environments.clear()


def _start_failed(how: str) -> ToolError:
    return ToolError(f"a worker process {how}; or set rollout.environment_workers=0")


def _located(what: Any) -> tuple[str, str | None]:
    address = address_of(what)
    if address is None:
        name = getattr(what, "__qualname__", repr(what))
        raise ConfigError(
            f"rollout.environment_workers > 0: {name} cannot be imported by a worker process; put it into a file of "
            "its own, or set rollout.environment_workers=0"
        )
    return address, digest_of(address)


def _packed(task: Task) -> bytes:
    try:
        return packed(task.arguments)
    except Unsendable as error:
        raise ToolError(
            f"{task.episode.uid}: the column {error.name!r} cannot be sent to a worker process ({error.why}); set "
            "rollout.environment_workers=0"
        ) from None
