"""Async rewards: an event loop in a thread of its own, and the calls made on it.

One loop serves a scorer's whole life, because clients that rewards keep (an HTTP session) belong to
the loop they were made in. Being in another thread, it works inside a notebook, whose own loop is
already running, and beside the other rewards of a step. A coroutine that blocks the loop cannot be
ended; when the deadline of every async reward has passed, that stops the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from mm_grpo.errors import RewardError
from mm_grpo.rewards.call import Call, RewardCalls

T = TypeVar("T")

BACKOFF = 0.5
"""Seconds before the first retry of a call; each further one waits twice as long."""
GRACE = 0.4
"""Seconds that cancelled coroutines get to end, and the loop to answer after that."""


class BackgroundLoop:
    """Runs coroutines beside synchronous code. Starts at first use."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin to run the coroutine."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def finish(self, future: concurrent.futures.Future[T], limit: float | None = None) -> T:
        """The coroutine's result, or what it raised; TimeoutError when it has not ended after `limit`
        seconds, because something blocks the loop, which is then given up."""
        try:
            return future.result(limit)
        except BaseException as error:  # a KeyboardInterrupt here must not leave the coroutine running
            if not future.done():
                future.cancel()
                if isinstance(error, TimeoutError):
                    self._loop = self._thread = None
            raise

    def abandon(self, future: concurrent.futures.Future[Any]) -> None:
        """Cancel a coroutine whose result nobody wants, and give it a moment to end."""
        if future.done() or self._loop is None:
            return
        future.cancel()
        barrier = asyncio.run_coroutine_threadsafe(_others(), self._loop)
        concurrent.futures.wait([barrier], timeout=2 * GRACE)

    def close(self) -> None:
        """Stop the loop and its thread; a later `start` starts anew. A loop that is blocked is left."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2 * GRACE)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None


async def run_async(rewards: Sequence[RewardCalls]) -> None:
    """All calls of all async rewards together; the first error that stops the run cancels the rest."""
    tasks = [asyncio.create_task(_reward(one)) for one in rewards]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await _cancel(tasks)
        raise


def finish(
    loop: BackgroundLoop,
    future: concurrent.futures.Future[None],
    rewards: Sequence[RewardCalls],
    since: float,
) -> None:
    """Wait for `run_async`, begun at `since` (time.monotonic), while its deadlines allow."""
    deadlines = [one.spec.options.deadline for one in rewards]
    known = [deadline for deadline in deadlines if deadline is not None]
    limit = max(known) + 2 * GRACE if len(known) == len(deadlines) else None
    try:
        loop.finish(future, None if limit is None else max(GRACE, since + limit - time.monotonic()))
    except TimeoutError as error:
        names = ", ".join(repr(one.spec.name) for one in rewards)
        raise RewardError(
            f"async rewards ({names}): the event loop does not answer, for one of them blocks it without "
            f"`await`, or goes on when it is cancelled. It runs in the trainer's process and cannot be killed, so "
            f"the run stops. Use an async library in it, or set isolated: true"
        ) from error


async def _reward(results: RewardCalls) -> None:
    spec, calls = results.spec, results.calls
    start = time.perf_counter()
    limit = asyncio.Semaphore(spec.options.max_concurrency or max(1, len(calls)))

    async def one(call: Call) -> None:
        async with limit:
            await _call(call, results)

    tasks = [asyncio.create_task(one(call)) for call in calls]
    try:
        done, late = await asyncio.wait(
            tasks, timeout=spec.options.deadline, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()
        await _cancel(late)
        for call, task in zip(calls, tasks, strict=True):
            if task in late:
                results.late(call, call.too_late(len(late), len(calls)))
    except BaseException:
        await _cancel(tasks)
        raise
    finally:
        results.seconds = time.perf_counter() - start


async def _call(call: Call, results: RewardCalls) -> None:
    task = asyncio.current_task()
    assert task is not None
    for tried in range(call.spec.options.retries + 1):
        try:
            answer = call()
            if hasattr(answer, "__await__"):
                answer = await answer
        except (KeyboardInterrupt, GeneratorExit):  # the latter closes a coroutine
            raise
        except BaseException as error:  # sys.exit(0) and asyncio.CancelledError too
            if task.cancelling():  # by us: too late
                raise
            if tried == call.spec.options.retries:
                results.failed(call, call.raised(error), error)
                return
            await asyncio.sleep(BACKOFF * 2**tried)
        else:
            if not task.cancelling():
                results.answered(call, answer)
            return


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE)


async def _others() -> None:
    """Wait for every other task of the loop to end."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if others:
        await asyncio.wait(others, timeout=GRACE)
