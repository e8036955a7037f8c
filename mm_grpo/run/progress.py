"""Progress on the terminal: one bar, or one line a step where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from mm_grpo.terminal import printable

# (label on the terminal, the metrics that may hold it: the first that is there counts)
SHOWN = (
    ("reward", ("reward",)),
    ("accuracy", ("accuracy", "rewards/accuracy/mean")),
    ("loss", ("loss",)),
)


class Progress:
    """Shows the steps up to `total`, of which `first` are done; use it as a context manager.

    It opens with `headline`. On a terminal it is a bar that stays at the bottom; elsewhere each step
    prints a line, so that a log file stays readable. `quiet` prints nothing: for processes other
    than the first.
    """

    def __init__(
        self,
        total: int,
        *,
        headline: str = "",
        first: int = 0,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self.total = total
        self._headline = headline
        self._quiet = quiet
        self._last = time.monotonic()
        self._bar: Bar | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[metrics]}", markup=False),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("train", total=total, completed=first, metrics="")

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        if self._headline:
            self.print(self._headline)
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.stop()

    def advance(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step `step`, counted from 1, is done. Its seconds are `step_time`, or the time since the last."""
        now = time.monotonic()
        seconds = metrics.get("step_time", now - self._last)
        self._last = now
        words = describe(metrics, seconds)
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.update(self._task, completed=step, metrics=words)
        else:
            self.print(f"step {step}/{self.total}  {words}")

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one; nothing in it is read as markup."""
        if not self._quiet:
            with self._while_there_is_a_terminal():
                self.console.print(Text(printable(text)), soft_wrap=True)

    @contextmanager
    def _while_there_is_a_terminal(self) -> Iterator[None]:
        """A terminal or a pipe that was closed ends the output, not the run."""
        try:
            yield
        except OSError:
            self._quiet = True
            self.console.quiet = True


def describe(metrics: Mapping[str, Any], seconds: float) -> str:
    """The few numbers worth watching, such as "reward 0.412  loss -0.0031  1.9 s/step"."""
    words = []
    for word, keys in SHOWN:
        value = next((metrics[key] for key in keys if metrics.get(key) is not None), None)
        if value is not None:
            words.append(f"{word} {value:.4f}" if word == "loss" else f"{word} {value:.3f}")
    words.append(f"{seconds:.1f} s/step")
    return "  ".join(words)
