"""How long tests wait for what other threads and processes do, on machines that are slow and busy."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds that nothing here needs, for it takes parts of one; what goes wrong takes longer, or for ever."""


def until(condition: Callable[[], object], what: str = "it", seconds: float = PATIENCE) -> None:
    """Wait until the condition holds; AssertionError where it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds:g} s"
        time.sleep(0.005)
