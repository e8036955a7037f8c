"""What user code in the trainer's process may not change: the rows that it is given, and the process's state.

`own_copy` gives a function values of its own: a reward that pops from a list column, edits messages or paints on an
image would otherwise change later calls, the log and, through the prompt, what is trained on. `kept_state` puts back
what a function changes for the whole process: the working folder, torch's gradient mode, default dtype and device,
autocast, and the global random numbers, from which adapters, dropout and other code draw. `kept_alive` and `end_fork`
see to it that a function neither ends the process, nor goes on as a second trainer.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn
from weakref import WeakSet

log = logging.getLogger(__name__)
LEFT: WeakSet[threading.Thread] = WeakSet()
"""Threads that user code started, and for which Python waits at its end."""


def own_copy(value: Any, memo: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """A copy of rows, messages, lists, images and arrays, all the way down; other values as they are.

    Numbers, texts and bytes cannot be changed, and objects of other classes are the user's own affair. With a `memo`
    what stands in several places is copied once: the completions of a group share their row in one call.
    """
    if isinstance(value, str | int | float | bytes | None):
        return value
    if memo is None:
        return _copied(value, memo)
    if id(value) not in memo:
        memo[id(value)] = value, _copied(value, memo)  # with the value, so that its id stays its own
    return memo[id(value)][1]


def _copied(value: Any, memo: dict[int, tuple[Any, Any]] | None) -> Any:
    if isinstance(value, Mapping):
        return {key: own_copy(inner, memo) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        copied = [own_copy(inner, memo) for inner in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*copied)
        return copied if type(value) is list else type(value)(copied)
    if dataclasses.is_dataclass(value) and type(value).__module__ == "mm_grpo.types":
        fields = {f.name: own_copy(getattr(value, f.name), memo) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    kind = type(value)
    if any(cls.__module__ == "PIL.Image" and cls.__name__ == "Image" for cls in kind.__mro__):
        return _copy_on_write(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return value.copy()
    return value


def _copy_on_write(image: Any) -> Any:
    """An image over the same pixels, which it copies when it is first drawn or pasted on (Pillow's `readonly`)."""
    image.load()
    made = image._new(image.im)
    made.readonly = 1
    return made


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
    threads = threading.enumerate()
    try:
        yield
    finally:
        changed: list[str] = []
        if left := [one for one in threading.enumerate() if one not in threads and not one.daemon]:
            LEFT.update(left)
            names = [one.name for one in left]
            log.warning("%s started %s; Python waits at its end for threads that are no daemons", who, names)
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


_exit, _lock, _blocks = os._exit, threading.Lock(), 0
_user_code_of: ContextVar[int] = ContextVar("the process in which this is user code", default=0)


@contextmanager
def kept_alive() -> Iterator[None]:
    """Within the block, in this thread or coroutine, os._exit raises SystemExit; in a fork it exits as ever.

    os._exit(0) of a reward would end a run as a success without a word.
    """
    _count_block(1)
    token = _user_code_of.set(os.getpid())
    try:
        yield
    finally:
        _user_code_of.reset(token)
        _count_block(-1)


def _count_block(more: int) -> None:
    global _blocks
    with _lock:
        _blocks += more
        os._exit = _refuse if _blocks else _exit


def _refuse(status: int) -> NoReturn:
    if _user_code_of.get() == os.getpid():
        raise SystemExit(f"os._exit({status})")
    _exit(status)


def end_fork(process: int, who: str) -> None:
    """End this process with a message, unless it is the one of that id."""
    if os.getpid() != process:
        os.write(2, f"{who} forked, and the fork came back; it is ended (os._exit ends a fork)\n".encode())
        os._exit(1)


def working_folder() -> str | None:
    """The working folder; None where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _torch_settings(torch: Any) -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """What a function may change of torch for the whole process: the value of each, and what sets it."""

    def autocast(given: tuple[bool, bool]) -> None:
        for device, enabled in zip(("cpu", "cuda"), given, strict=True):
            torch.set_autocast_enabled(device, enabled)

    def device(given: Any) -> None:
        torch.set_default_device(None if given.type == "cpu" else given)

    return {
        "torch's gradient mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "torch's default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "torch's default device": (torch.get_default_device(), device),
        "torch's autocast": (tuple(map(torch.is_autocast_enabled, ("cpu", "cuda"))), autocast),
    }
