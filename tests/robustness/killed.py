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
from pathlib import Path
from typing import Any

from mm_grpo.cli.main import main
from mm_grpo.learner import state
from mm_grpo.learner.learner import Learner
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.folder import RunFolder

Act = Callable[[], None]


def before(holder: Any, name: str, act: Act) -> None:
    """Act before the second call of a function."""
    real, count = getattr(holder, name), 0

    def acting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            act()
        return real(*args, **kwargs)

    setattr(holder, name, acting)


def half_a_state(act: Act) -> None:
    real, count = state._write, 0

    def write(path: Path, *rest: Any) -> Any:
        nonlocal count
        mark = real(path, *rest)
        count += 1
        if count == 2:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2])
            act()
            path.write_bytes(data)  # a signal that is noted lets the write go on
        return mark

    state._write = write


def half_a_row(act: Act) -> None:
    real, count = RunFolder.on_log, 0

    def append(self: RunFolder, step: int, metrics: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            data = self.paths.metrics.read_bytes()
            self.paths.metrics.write_bytes(data + b'{"step": 2, "lo')
            act()
            self.paths.metrics.write_bytes(data)
        real(self, step, metrics)

    RunFolder.on_log = append  # type: ignore[method-assign]


def renaming(act: Act) -> None:
    """In checkpoint_writer._finish all is written, and the rename is next."""
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
