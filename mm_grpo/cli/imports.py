"""Importing torch, transformers and what stands on them, as quickly as it goes.

They make some 400,000 objects that live as long as the process, and Python's garbage collector walks through all of
them again and again while they are made, which is a third of the time of the imports.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import within it. Nothing is collected meanwhile, and what is there at the end is not looked at again. Then
    transformers draws no progress bars of its own, which would break ours.

    For a process that is ours from its start: what a caller of the Python API has made stays the collector's. So it
    does where torch is there already, for then the objects that live on are not these.
    """
    enabled, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    finally:
        if first:
            gc.freeze()
        if enabled:
            gc.enable()
