"""Importing torch, transformers and what stands on them, as quickly and as quietly as it goes.

They make some 400,000 objects that live as long as the process, and Python's garbage collector walks through all of
them again and again while they are made, which is a third of the time of the imports.

Quiet are DeepSpeed's warnings, such as the one that there is no GPU, and those of transformers about names that a later
version will drop: none of them is the user's to mend.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import warnings
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
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|mm_grpo)\.")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        yield
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    finally:
        if first:
            gc.freeze()
            atexit.register(gc.unfreeze)  # nanobind's modules would call their frozen objects leaks
        if enabled:
            gc.enable()
