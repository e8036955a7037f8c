"""Async and isolated rewards: their calls, made together on an event loop in a thread of its own.

An isolated reward's calls wait for a worker process (`isolation.py`). A coroutine that blocks the loop cannot be ended;
when the deadline of every async reward has passed, that stops the run. If it lets no other thread run either, a
watchdog ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from typing import TYPE_CHECKING

from mm_grpo import background
from mm_grpo.errors import RewardError
from mm_grpo.rewards.call import Call, RewardCalls
from mm_grpo.user_code.watchdog import LOCK_GRACE, watchdog

if TYPE_CHECKING:
    from mm_grpo.rewards.isolation import WorkerPool


class AsyncCalls:
    """The calls of rewards that do not wait for each other, made together on the loop: of async ones, or of isolated
    ones in their `pools`. A call begins when it is added. `close` says that all have been added: time-outs count from
    then on. `finish` waits for the answers."""

    def __init__(
        self,
        loop: background.BackgroundLoop,
        rewards: Iterable[RewardCalls],
        pools: Mapping[str, WorkerPool] | None = None,
    ) -> None:
        self.loop, self.isolated = loop, pools is not None
        self.running = {one.spec.name: _RewardTasks(one, (pools or {}).get(one.spec.name)) for one in rewards}
        self._called: dict[str, RewardCalls] = {}
        self._all_added, self._since = asyncio.Event(), 0.0
        self.future = loop.submit(self._answers())
        limit = self._limit(one.results for one in self.running.values())
        if limit is not None:
            threading.Thread(target=self._watch, args=(limit,), name="rewards watch", daemon=True).start()

    def add(self, name: str, calls: Iterable[Call]) -> None:
        """Begin calls of the reward of that name."""
        if added := list(calls):
            self._called[name] = self.running[name].results
            self.loop.call_soon(self.running[name].begin, added)

    def close(self) -> None:
        """All calls have been added."""
        self._since = time.monotonic()
        self.loop.call_soon(self._all_added.set)

    def finish(self) -> None:
        """Wait for the answers, while the deadlines allow; the first error that stops the run cancels the rest."""
        rewards = self._called.values()
        limit = self._limit(rewards)
        try:
            left = None if limit is None else max(background.GRACE, self._since + limit - time.monotonic())
            self.loop.result(self.future, left)
        except TimeoutError as error:
            names = ", ".join(repr(one.spec.name) for one in rewards)
            raise RewardError(
                f"async rewards ({names}): the event loop does not answer, for one of them blocks it without `await`, "
                f"or goes on when it is cancelled; use an async library in it, or set isolated: true"
            ) from error

    def abandon(self) -> None:
        """Cancel the calls, whose answers nobody wants."""
        self.loop.cancel(self.future)

    def _watch(self, limit: float) -> None:
        """Start a watchdog anew each second, which a thread can do while no call keeps the interpreter's lock."""
        while not self.future.done():
            with watchdog(limit + LOCK_GRACE):
                wait([self.future], timeout=1.0)

    def _limit(self, rewards: Iterable[RewardCalls]) -> float | None:
        """Seconds that the calls may take together; None where one has no time-out, or workers are killed at it."""
        deadlines = [one.spec.options.deadline for one in rewards]
        known = [deadline for deadline in deadlines if deadline is not None]
        bounded = known and len(known) == len(deadlines) and not self.isolated
        return max(known) + 2 * background.GRACE if bounded else None

    async def _answers(self) -> None:
        running = self.running.values()
        waits: list[asyncio.Task[None]] = []
        try:
            await self._all_added.wait()
            waits = [asyncio.create_task(one.answers()) for one in running]
            await asyncio.gather(*waits)
        except BaseException:
            await background.cancel_tasks([*waits, *(task for one in running for task in one.tasks)])
            raise


class _RewardTasks:
    """One reward's calls on the loop. `results.seconds` is how long any of them was under way."""

    def __init__(self, results: RewardCalls, pool: WorkerPool | None) -> None:
        self.results, self.pool = results, pool
        self.tasks: dict[asyncio.Task[None], Call] = {}
        most = results.spec.options.max_concurrency
        self._limit = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)
        self._left, self._since, self._failed = 0, 0.0, False

    def begin(self, calls: Iterable[Call]) -> None:
        """Begin calls, unless one failed before that stops the run."""
        for call in () if self._failed else calls:
            if not self._left:
                self._since = time.perf_counter()
            self._left += 1
            task = asyncio.create_task(self._one(call))
            self.tasks[task] = call
            task.add_done_callback(self._ended)

    async def answers(self) -> None:
        """Wait for all calls, no longer than the time-out from now on."""
        if not self.tasks:
            return
        results = self.results
        try:
            if self.pool is not None:
                await self.pool.ready()
            done, late = await asyncio.wait(
                self.tasks, timeout=results.spec.options.deadline, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in self.tasks:
                if task in done:
                    task.result()
            await background.cancel_tasks(late)
            calls = sorted((self.tasks[task] for task in late), key=lambda call: call.rows)
            for call in calls:
                results.late(call, call.too_late(len(late), len(self.tasks)))
        except BaseException:
            await background.cancel_tasks(self.tasks)
            raise
        finally:
            if self._left:
                results.seconds += time.perf_counter() - self._since
            if self.pool is not None:
                self.pool.trim()

    async def _one(self, call: Call) -> None:
        async with self._limit:
            await (_call if self.pool is None else self.pool.call)(call, self.results)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._left -= 1
        if not self._left:
            self.results.seconds += time.perf_counter() - self._since
        self._failed = self._failed or (not task.cancelled() and task.exception() is not None)


async def _call(call: Call, results: RewardCalls) -> None:
    task = asyncio.current_task()
    assert task is not None
    try:
        answer = call()
        if hasattr(answer, "__await__"):
            answer = await answer
    except (KeyboardInterrupt, GeneratorExit):  # the latter closes a coroutine
        raise
    except BaseException as error:  # sys.exit(0) and asyncio.CancelledError too
        if task.cancelling():  # by us: too late
            raise
        results.failed(call, call.raised(error), error)
    else:
        if not task.cancelling():
            results.answered(call, answer)
