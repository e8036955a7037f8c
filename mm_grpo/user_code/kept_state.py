"""Protection from user code in the trainer's process: copies of rows, and restored process state.

A reward that pops from a list or paints on an image would change later calls, the log and, through the conversation,
the training data; `own_copy` prevents that. `kept_state` restores the working folder, torch's gradient mode and default
dtype, and the global random numbers, which adapters and dropout use.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


def own_copy(value: Any) -> Any:
    """Copy rows, messages, lists, images and arrays, all the way down. Return other values as they are.

    Numbers, texts and bytes cannot be changed; objects of other classes are the user's. An image is copied when it is
    first written to, and an encoded one opened.
    """
    if isinstance(value, str | int | float | bytes | None):
        return value
    if type(value) is tuple and {int, float}.issuperset(map(type, value)):  # tokens, in thousands
        return value
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:
            from mm_grpo.user_code.lazy_image import with_pil_images

            return with_pil_images(value)
        return {key: own_copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        copied = [own_copy(inner) for inner in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*copied)
        return copied if type(value) is list else type(value)(copied)
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("mm_grpo."):
        fields = {f.name: own_copy(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    kind = type(value)
    if any(cls.__module__ == "PIL.Image" and cls.__name__ == "Image" for cls in kind.__mro__):
        from mm_grpo.user_code.shared_image import shared

        return shared(value)
    if kind is bytearray or (kind.__module__ == "numpy" and kind.__name__ == "ndarray"):
        return copy.deepcopy(value)
    return value


@contextmanager
def kept_state(who: str) -> Iterator[None]:
    """Restore what the block changes for the whole process. One warning names `who` and the changes.

    Global random numbers are restored without a warning, because using them is no mistake.
    """
    folder = os.getcwd()
    python_state, torch, numpy = random.getstate(), sys.modules.get("torch"), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    settings = {} if torch is None else _torch_settings(torch)
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        changed: list[str] = []
        random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
            current = _torch_settings(torch)
            for name, (value, restore) in settings.items():
                if current[name][0] != value:
                    restore(value)
                    changed.append(name)
        if working_folder() != folder:
            os.chdir(folder)
            changed.append("the working folder")
        if changed:
            log.warning(
                "%s changed %s for the whole process, which was put back; rewards share a process with the learner, so "
                "use a `with` block, or isolated: true",
                who,
                ", ".join(changed),
            )


def working_folder() -> str | None:
    """Return the working folder; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _torch_settings(torch: Any) -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """Return the settings of torch that are the whole process's: by name the value and its setter."""
    return {
        "torch's gradient mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "torch's default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
    }
