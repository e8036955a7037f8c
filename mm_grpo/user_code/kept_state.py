"""What user code in the trainer's process may not change: the rows that it is given, and the process's state.

`own_copy` gives a function values of its own: a reward that pops from a list column or an argument of a call, or paints
on an image, would otherwise change later calls, the log and, through the conversation, what is trained on. `kept_state`
puts back what a function changes for the whole process: the working folder, torch's gradient mode and default dtype,
and the global random numbers, from which adapters, dropout and other code draw.
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
    """A copy of rows, messages, lists, images and arrays, all the way down; other values as they are.

    Numbers, texts and bytes cannot be changed, and objects of other classes are the user's own affair. An image is
    copied when it is first written to.
    """
    if isinstance(value, str | int | float | bytes | None):
        return value
    if type(value) is tuple and {int, float}.issuperset(map(type, value)):  # tokens, in thousands
        return value
    if isinstance(value, Mapping):
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
    """Put back what the block changes for the whole process; one warning names `who` and what it changed.

    Global random numbers go on as they were without a warning: to draw one is no mistake.
    """
    folder = os.getcwd()
    python, torch, numpy = random.getstate(), sys.modules.get("torch"), sys.modules.get("numpy")
    numbers = None if numpy is None else numpy.random.get_state()
    held = {} if torch is None else _torch_settings(torch)
    drawn = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        changed: list[str] = []
        random.setstate(python)
        if numpy is not None and numbers is not None:
            numpy.random.set_state(numbers)
        if torch is not None:
            torch.set_rng_state(drawn)
            now = _torch_settings(torch)
            for name, (value, put_back) in held.items():
                if now[name][0] != value:
                    put_back(value)
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
    """The working folder; None where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _torch_settings(torch: Any) -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """What a function may change of torch for the whole process: the value of each, and what sets it."""
    return {
        "torch's gradient mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "torch's default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
    }
