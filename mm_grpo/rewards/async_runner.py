"""Async and isolated rewards: calls made together on an event loop in a background thread.

An isolated reward's calls wait for a worker process (`isolation.py`). A coroutine that blocks the loop cannot be ended;
when the deadline of every async reward has passed, that stops the run. If it lets no other thread run either, a
watchdog ends the process.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING

from mm_grpo import background
from mm_grpo.errors import RewardError
from mm_grpo.rewards.call import Call, RewardCalls
from mm_grpo.user_code.watchdog import LOCK_GRACE, watchdog

if TYPE_CHECKING:
    from mm_grpo.rewards.isolation import WorkerPool


class AsyncRunner:
    """Runner of the calls of several rewards on one loop: of async ones, or of isolated ones in their `pools`.

    A call starts when it is added. Time-outs count from `close`, which says that all calls have been added.
    """

    def __init__(
        self,
        loop: background.BackgroundLoop,
        rewards: Sequence[RewardCalls],
        pools: Mapping[str, WorkerPool] | None = None,
    ) -> None:
        self.loop, self.rewards, self.pools = loop, rewards, pools
        self._rows: defaultdict[str, set[int]] = defaultdict(set)  # first rows of the calls that were added
        self._tasks: defaultdict[str, dict[asyncio.Task[None], Call]] = defaultdict(dict)
        self._slots = {
            reward.spec.name: asyncio.Semaphore(reward.spec.options.max_concurrency or sys.maxsize)
            for reward in rewards
        }
        self._stopped: set[str] = set()
        self._all_added, self._close_time = asyncio.Event(), 0.0
        self.future = loop.submit(self._run())
        seconds = self._time_limit(rewards)
        if seconds is not None:
            threading.Thread(target=self._watch, args=(seconds,), name="rewards watch", daemon=True).start()

    def add(self, reward: RewardCalls, calls: Iterable[Call]) -> None:
        """Start the calls that were not added before."""
        rows = self._rows[reward.spec.name]
        if new_calls := [call for call in calls if call.rows[0] not in rows]:
            rows.update(call.rows[0] for call in new_calls)
            self.loop.call_soon(self._start, reward, new_calls)

    def close(self) -> None:
        """Start the time-outs: all calls have been added."""
        self._close_time = time.monotonic()
        self.loop.call_soon(self._all_added.set)

    def finish(self) -> None:
        """Wait for the answers until the deadlines. The first error that stops the run cancels the other calls."""
        called = [reward for reward in self.rewards if self._rows[reward.spec.name]]
        limit = self._time_limit(called)
        try:
            remaining = None
            if limit is not None:
                remaining = max(background.GRACE, self._close_time + limit - time.monotonic())
            self.loop.result(self.future, remaining)
        except TimeoutError as error:
            names = ", ".join(repr(reward.spec.name) for reward in called)
            raise RewardError(
                f"async rewards ({names}): the event loop does not answer, for one of them blocks it without `await`, "
                f"or goes on when it is cancelled; use an async library in it, or set isolated: true"
            ) from error

    def abandon(self) -> None:
        """Cancel the calls that still run."""
        self.loop.cancel(self.future)

    def _watch(self, limit: float) -> None:
        # A call that holds the interpreter's lock stops this thread too: then the last watchdog is not renewed.
        while not self.future.done():
            with watchdog(limit + LOCK_GRACE):
                wait([self.future], timeout=1.0)

    def _time_limit(self, rewards: Iterable[RewardCalls]) -> float | None:
        """Return the seconds for all calls; None if a reward has no time-out, or if workers are killed at it."""
        deadlines = [reward.spec.options.deadline for reward in rewards]
        limits = [deadline for deadline in deadlines if deadline is not None]
        bounded = limits and len(limits) == len(deadlines) and self.pools is None
        return max(limits) + 2 * background.GRACE if bounded else None

    # in the loop's thread ----------------------------------------------------------------------

    async def _run(self) -> None:
        waits: list[asyncio.Task[None]] = []
        try:
            await self._all_added.wait()
            waits = [asyncio.create_task(self._wait_for(reward)) for reward in self.rewards]
            await asyncio.gather(*waits)
        except BaseException:
            await background.cancel_tasks(
                [*waits, *(task for tasks in self._tasks.values() for task in tasks)]
            )
            raise

    def _start(self, reward: RewardCalls, calls: Iterable[Call]) -> None:
        name = reward.spec.name
        for call in () if name in self._stopped else calls:
            self._tasks[name][asyncio.create_task(self._make(reward, call))] = call

    async def _make(self, reward: RewardCalls, call: Call) -> None:
        name = reward.spec.name
        try:
            with reward.clock():
                async with self._slots[name]:
                    if self.pools is None:
                        await _await_answer(reward, call)
                    else:
                        await self.pools[name].call(reward, call)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._stopped.add(name)  # the run stops: start no further call
            raise

    async def _wait_for(self, reward: RewardCalls) -> None:
        """Wait for all calls of a reward, until its deadline from now on."""
        tasks, pool = self._tasks[reward.spec.name], (self.pools or {}).get(reward.spec.name)
        if not tasks:
            return
        try:
            if pool is not None:
                await pool.ready()  # starting a worker is outside the deadline
            deadline = reward.spec.options.deadline
            finished, late = await asyncio.wait(tasks, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task in finished:
                    task.result()
            await background.cancel_tasks(late)
            for call in sorted((tasks[task] for task in late), key=lambda call: call.rows):
                reward.fail(call.rows, call.too_late(len(late), len(tasks)), late=True)
        except BaseException:
            await background.cancel_tasks(tasks)
            raise
        finally:
            reward.stop_clock()
            if pool is not None:
                pool.trim()


async def _await_answer(reward: RewardCalls, call: Call) -> None:
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
        reward.fail(call.rows, call.raised(error), error)
    else:
        if not task.cancelling():
            reward.set_answer(call, answer)
