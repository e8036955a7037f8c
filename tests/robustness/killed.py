"""`killed.py PLACE SIGNAL... -- COMMAND`: `mm-grpo COMMAND` in which a process sends itself signals at one place.

PLACES names the places, each in the second step where steps count. A signal is sent once; two signals are sent in turn.
`full` for SIGNAL stands for a disk on which no file may be larger than 50,000 bytes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

from mm_grpo.cli.main import main
from mm_grpo.learner import state
from mm_grpo.learner.learner import Learner
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.folder import RunFolder

Act = Callable[[], None]


def replace_second_call(holder: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let the second call of a function be `replacement(function, *arguments)`."""
    real, calls = getattr(holder, name), count(1)

    @wraps(real)  # callbacks get the arguments that their signature names
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(real, *args, **kwargs) if next(calls) == 2 else real(*args, **kwargs)

    setattr(holder, name, call)


def before(holder: Any, name: str, act: Act) -> None:
    """Act before the second call of a function."""

    def acting(real: Any, *args: Any, **kwargs: Any) -> Any:
        act()
        return real(*args, **kwargs)

    replace_second_call(holder, name, acting)


def half_a_state(act: Act) -> None:
    def write(real: Any, file: state.StateFile, path: Path) -> Any:
        mark = real(file, path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        act()
        path.write_bytes(data)  # a signal that is noted lets the write go on
        return mark

    replace_second_call(state.StateFile, "write", write)


def half_a_row(act: Act) -> None:
    def append(real: Any, folder: RunFolder, step: int, metrics: Any) -> None:
        data = folder.paths.metrics.read_bytes()
        folder.paths.metrics.write_bytes(data + b'{"step": 2, "lo')
        act()
        folder.paths.metrics.write_bytes(data)
        real(folder, step, metrics)

    replace_second_call(RunFolder, "on_log", append)


def renaming(act: Act) -> None:
    """In checkpoint._finish all is written, and the rename is next."""
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == "step-000002":
            act()
        real(source, target)

    os.replace = replace


PLACES: dict[str, Callable[[Act], None]] = {
    "while it updates": lambda act: before(Learner, "update", act),
    "in half a row of metrics.jsonl": half_a_row,
    "before a checkpoint": lambda act: before(Checkpoints, "save", act),
    "in half a state of a checkpoint": half_a_state,
    "before a checkpoint is renamed": renaming,
}


def full() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def run() -> None:
    place, *names = sys.argv[1 : sys.argv.index("--")]
    sys.argv = ["mm-grpo", *sys.argv[sys.argv.index("--") + 1 :]]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGXFSZ):  # as a shell starts a process
        signal.signal(number, signal.SIG_DFL if number != signal.SIGXFSZ else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def act() -> None:
        for name in names:
            full() if name == "full" else os.kill(os.getpid(), signal.Signals[name])

    PLACES[place](act)
    main()


if __name__ == "__main__":
    run()
