"""Progress on the terminal: one bar, or one line a step where there is no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from mm_grpo.terminal import printable

# (label on the terminal, the metrics that may hold it: the first that is there counts, how it is written)
SHOWN = (
    ("reward", ("reward",), "{:.3f}"),
    ("±", ("reward_std",), "{:.3f}"),  # within groups
    ("accuracy", ("accuracy", "rewards/accuracy/mean"), "{:.3f}"),
    ("zero spread", ("frac_reward_zero_std",), "{:.0%}"),  # groups whose rewards are all equal
    ("length", ("completions/mean_length",), "{:.1f}"),
    ("clipped", ("completions/clipped_ratio",), "{:.0%}"),
    ("loss", ("loss",), "{:.4f}"),
    ("sight", ("sight/nats",), "{:.2f}"),  # what images add to log-probs, in nats
)
SILENCE = 10.0
"""Seconds without a line after which a long evaluation prints how far it is, where there is no terminal."""
RECENT = 20
"""Steps, with the evaluations among them, by whose mean the time that is left is estimated."""


class Progress:
    """Shows the steps up to `total`, of which `first` are done; use it as a context manager.

    It opens with `headline`. On a terminal it is a bar that stays at the bottom; elsewhere each step
    prints a line, so that a log file stays readable. `quiet` prints nothing: for processes other
    than the first. `tokens` are those of the steps that are done, of prompts and completions.
    """

    def __init__(
        self,
        total: int,
        *,
        headline: str = "",
        first: int = 0,
        tokens: float = 0,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self.total = total
        self._headline = headline
        self._quiet = quiet
        self._tokens = tokens
        self._last = self._printed = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT)
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

    def begin(self) -> None:
        """The first step begins now: what came before it says nothing of the time that steps take."""
        self._last = time.monotonic()

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step `step`, counted from 1, is done. Its seconds are `step_time`, or the time since the last."""
        if step == 0:
            return
        now = time.monotonic()
        self._recent.append(now - self._last)
        seconds = metrics.get("step_time", now - self._last)
        self._last = now
        words = describe(metrics, seconds)
        if (tokens := metrics.get("num_tokens")) is not None:
            words += f"  {(tokens - self._tokens) / max(seconds, 1e-9):,.0f} tokens/s"
            self._tokens = tokens
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.update(self._task, completed=step, metrics=words)
        else:
            left = (self.total - step) * sum(self._recent) / len(self._recent)
            ends = f"  {duration(left)} left" if step < self.total else ""
            self.print(f"step {step}/{self.total}  {words}{ends}")

    def evaluating(self, name: str, done: int, total: int) -> None:
        """An evaluation has answered `done` of the `total` rows of the set `name`."""
        words = f"evaluating {name} {done}/{total}"
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.update(self._task, metrics=words)
        elif time.monotonic() - self._printed >= SILENCE:
            self.print(words)

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one; nothing in it is read as markup."""
        self._printed = time.monotonic()
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
    """The few numbers worth watching, such as "reward 0.412  zero spread 25%  loss -0.0031  1.9 s/step"."""
    words = []
    for word, keys, form in SHOWN:
        value = next((metrics[key] for key in keys if metrics.get(key) is not None), None)
        if value is not None:
            words.append(f"{word} {form.format(value)}")
    words.append(f"{seconds:.1f} s/step")
    return "  ".join(words).replace("  ±", " ±")


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(42), duration(200), duration(7500)
    ('42 s', '3 min 20 s', '2 h 05 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
