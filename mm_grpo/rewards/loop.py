"""An event loop in a thread of its own, for async rewards.

One loop serves a scorer's whole life, because clients that rewards keep (an HTTP session) belong to
the loop they were made in. Being in another thread, it works inside a notebook, whose own loop is
already running.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines to their end from synchronous code. Starts at first use."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and give its result, or raise what it raised."""
        import asyncio  # not at the top: it costs most of the import of mm_grpo.rewards

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # a KeyboardInterrupt here must not leave the coroutine running
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and its thread; a later `run` starts anew."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None
