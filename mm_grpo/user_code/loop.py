"""An event loop in a thread of its own: coroutines beside synchronous code.

One loop serves its owner's whole life, because clients that user code keeps (an HTTP session) belong to the loop they
were made in. Being in another thread, it works inside a notebook, whose own loop is already running.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
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

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop's thread, after what was begun before."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call, *args)

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
        if self._thread is not threading.current_thread():  # where the owner is collected
            self._thread.join(timeout=2 * GRACE)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and give them a moment to end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE)


async def _others() -> None:
    """Wait for every other task of the loop to end."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if others:
        await asyncio.wait(others, timeout=GRACE)
