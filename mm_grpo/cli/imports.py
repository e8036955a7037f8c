"""Import torch and transformers quickly and quietly.

The imports make some 400,000 objects that live as long as the process. Python's garbage collector would walk through
them again and again, which is a third of the time. Warnings that the user cannot act on are silenced: DeepSpeed's,
such as the missing GPU, and deprecations in transformers and vLLM.
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
    """Run imports without garbage collection; then freeze their objects and turn off transformers' progress bars.

    Only for the commands: in a caller's process, or if torch is imported already, the objects are not ours to freeze.
    """
    enabled, is_first_import = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|mm_grpo|vllm)\.")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        yield
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # they would break ours
    finally:
        if is_first_import:
            gc.freeze()
            atexit.register(gc.unfreeze)  # modules of nanobind would report frozen objects as leaks
        if enabled:
            gc.enable()
