"""What user code in the trainer's process may not change: the rows that it is given, and the process's state.

`own_copy` gives a function values of its own: a reward that pops from a list column, edits messages or paints on an
image would otherwise change later calls, the log and, through the prompt, what is trained on. `kept_state` puts back
what a function changes for the whole process: the working folder, torch's gradient mode, default dtype and device,
autocast, and the global random numbers, from which adapters, dropout and other code draw. `kept_alive` and `end_fork`
see to it that a function neither ends the process, nor keeps it from ending, nor goes on as a second trainer.
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
from typing import Any, NoReturn

log = logging.getLogger(__name__)


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
    held = None if torch is None else _torch_state(torch)
    drawn = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        changed: list[str] = []
        random.setstate(python)
        if numpy is not None and numbers is not None:
            numpy.random.set_state(numbers)
        if torch is not None and held is not None:
            torch.set_rng_state(drawn)
            changed += _put_back(torch, held)
        if _folder() != folder:
            os.chdir(folder)
            changed.append("the working folder")
        if changed:
            log.warning(
                "%s changed %s for the whole process, which was put back; rewards share a process with the learner, so "
                "use a `with` block, or isolated: true",
                who,
                ", ".join(changed),
            )


@contextmanager
def kept_alive(*, here: bool = True) -> Iterator[None]:
    """Within the block os._exit raises SystemExit where user code runs, and threads that it starts are daemons.

    os._exit(0) would end a run as a success without a word, and Python waits at its end for threads that are none. User
    code runs in those threads that are named "reward..." and, where it runs `here`, in this one; other threads, and
    forks, exit as ever. Blocks of several threads may begin and end in any order.
    """
    own = threading.current_thread() if here else None
    daemon = own is not None and own.daemon
    _refusal.enter(own)
    if own is not None:
        own._daemonic = True  # type: ignore[attr-defined]  # `daemon` cannot be set any more
    try:
        yield
    finally:
        _refusal.leave(own)
        if own is not None:
            own._daemonic = daemon  # type: ignore[attr-defined]


class _Refusal:
    """os._exit as it is while some block of `kept_alive` runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[threading.Thread | None] = []
        self._process = 0
        self._exit: Callable[[int], NoReturn] = os._exit

    def enter(self, thread: threading.Thread | None) -> None:
        with self._lock:
            if not self._blocks:
                self._process, self._exit, os._exit = os.getpid(), os._exit, self._refuse
            self._blocks.append(thread)

    def leave(self, thread: threading.Thread | None) -> None:
        with self._lock:
            self._blocks.remove(thread)
            if not self._blocks:
                os._exit = self._exit  # type: ignore[assignment]

    def _refuse(self, status: int) -> NoReturn:
        thread = threading.current_thread()
        if os.getpid() == self._process and (thread in self._blocks or thread.name.startswith("reward")):
            raise SystemExit(f"os._exit({status})")
        self._exit(status)


_refusal = _Refusal()


def end_fork(process: int, who: str) -> None:
    """End this process with a message, unless it is the one of that id."""
    if os.getpid() != process:
        os.write(2, f"{who} forked, and the fork came back; it is ended (os._exit ends a fork)\n".encode())
        os._exit(1)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _torch_state(torch: Any) -> dict[str, Any]:
    return {
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
    }


def _put_back(torch: Any, held: Mapping[str, Any]) -> list[str]:
    """The names of what differed."""
    now = _torch_state(torch)
    changed = [name for name, value in held.items() if now[name] != value]
    for name in changed:
        value = held[name]
        if name == "torch's gradient mode":
            torch.set_grad_enabled(value)
        elif name == "torch's default dtype":
            torch.set_default_dtype(value)
        elif name == "torch's default device":
            torch.set_default_device(None if value.type == "cpu" else value)
        else:
            for device, enabled in zip(("cpu", "cuda"), value, strict=True):
                torch.set_autocast_enabled(device, enabled)
    return changed
