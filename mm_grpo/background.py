"""Daemon threads that make calls, and an event loop in a daemon thread.

Callers wait for a result with a deadline. At exit Python joins the threads of `concurrent.futures.ThreadPoolExecutor`
without a limit, so one user function or server that hangs would keep the process alive for ever. Daemon threads are
not joined.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Collection, Coroutine
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

# Methods import asyncio when they need it: it would take most of the import time of mm_grpo.rewards.

T = TypeVar("T")
GRACE = 0.4
"""Seconds that cancelled coroutines get to end, and the loop to answer after that."""


class BackgroundThreads(concurrent.futures.Executor):
    """Executor with at most `threads` daemon threads, which make calls in the order of `submit`.

    A thread starts when a call finds none idle. Each runs `prepare` first.
    """

    def __init__(self, threads: int, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self.threads, self.name, self.prepare = threads, name, prepare
        self._calls: SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None] = (
            SimpleQueue()
        )
        self._lock = threading.Lock()
        self._started = self._unfinished = 0
        self._closed = False

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Make a call as soon as a thread is idle. Raise RuntimeError after `close`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            self.require_open()
            self._calls.put((future, lambda: call(*args, **kwargs)))
            self._unfinished += 1
            if self._started < min(self.threads, self._unfinished):
                self._started += 1
                name = f"{self.name} {self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def require_open(self) -> None:
        """Raise RuntimeError after `close`. Long calls check it between their parts."""
        if self._closed:
            raise RuntimeError(f"{self.name}: the run has ended")

    def close(self) -> None:
        """Cancel the calls that wait, and refuse new ones. A thread ends after its current call."""
        with self._lock:
            self._closed = True
            while not self._calls.empty():
                if (job := self._calls.get()) is not None:
                    job[0].cancel()
            for _ in range(self._started):
                self._calls.put(None)

    def _work(self) -> None:
        self.prepare()
        while (job := self._calls.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # KeyboardInterrupt of a tool too
                    future.set_exception(error)
            with self._lock:
                self._unfinished -= 1
            del job, future, call  # an idle thread keeps no tensors alive


class BackgroundLoop:
    """Event loop in a daemon thread, which starts with the first coroutine.

    One loop serves its owner's whole life, because clients that user code keeps (an HTTP session) belong to the loop
    they were made in. In a thread it also works inside a notebook, whose own loop is already running.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine, from any thread. Cancelling the future cancels it."""
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop's thread, after everything submitted before. Do nothing without a loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call, *args)

    def result(self, future: concurrent.futures.Future[T], seconds: float | None = None) -> T:
        """Return the coroutine's result, or raise its exception.

        Raise TimeoutError after `seconds`. Then something blocks the loop, and the next `submit` starts a new one.
        """
        try:
            return future.result(seconds)
        except BaseException as error:  # a KeyboardInterrupt here must not leave the coroutine running
            if not future.done():
                future.cancel()
                if isinstance(error, TimeoutError):
                    self._loop = self._thread = None
            raise

    def cancel(self, future: concurrent.futures.Future[Any]) -> None:
        """Cancel a coroutine, and give it up to two `GRACE` to end."""
        import asyncio

        if future.done() or self._loop is None:
            return
        future.cancel()
        barrier = asyncio.run_coroutine_threadsafe(_other_tasks(), self._loop)
        concurrent.futures.wait([barrier], timeout=2 * GRACE)

    def close(self) -> None:
        """Stop the loop and its thread; a blocked loop is left alone. A later `submit` starts a new one."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():  # a finalizer may run in the loop's own thread
            self._thread.join(timeout=2 * GRACE)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None


async def cancel_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and give them `GRACE` to end."""
    import asyncio

    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE)


async def _other_tasks() -> None:
    """Wait at most `GRACE` for every other task of the loop to end."""
    import asyncio

    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE)
