"""SIGINT (Ctrl-C), SIGTERM and SIGHUP end a run after the running step, with a checkpoint.

`StopSignals` notes the first of them; a second Ctrl-C raises KeyboardInterrupt at once, because a step may hang. A
signal that the process ignores (nohup, a shell's background job) stays ignored. Handlers are set in the main thread
only, because Python allows no other, and are put back at the end.
"""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunInterrupted(KeyboardInterrupt):
    """A signal ended the run after a step; the text says how to go on. `code` is the exit code, 128 + signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


class StopSignals:
    """Context manager around a run that notes signals; `quiet` prints nothing, on processes other than the first."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.number = 0
        """Number of the first signal that came, 0 before one came."""
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: set by C code
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @staticmethod
    def interruption(number: int, step: int, saved: int | None, run_dir: Path) -> RunInterrupted:
        """Return the error of a run that signal `number` ends after `step`; `saved` is the newest checkpoint's step."""
        name = signal.Signals(number).name
        text = f"stopped by {name} after step {step};"
        if not step:
            text = f"stopped by {name} before the first step ended; start again with the same command"
        elif saved is None:
            text += " run.save_every is 0, so nothing of it can be resumed"
        else:
            text += (
                f" the checkpoint of step {saved} is in '{run_dir}': go on with the same command and --resume"
            )
        return RunInterrupted(text, number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.number = not self.number, self.number or number
        if first and not self._quiet:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            text = f"\n{name}: the run ends after this step; Ctrl-C once more ends it at once"
            with suppress(OSError, RuntimeError):  # the terminal is gone, or busy with a write
                print(text, file=sys.stderr, flush=True)
