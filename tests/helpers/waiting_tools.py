"""Tools for worker processes, of which one waits for what another one does."""

from __future__ import annotations

import os
import time


def wait_for(path: str) -> str:
    """Wait until a file is there.

    Args:
        path: The file.
    """
    while not os.path.exists(path):
        time.sleep(0.01)
    return "it is there"


def make(path: str) -> str:
    """Make a file.

    Args:
        path: The file.
    """
    open(path, "x").close()
    return "made"


def note() -> str:
    """Note it."""
    return "noted"


def fail() -> str:
    """Fail."""
    raise OSError("gone")
