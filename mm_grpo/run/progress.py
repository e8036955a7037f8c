"""Progress of a run: one bar on a terminal, one table in a notebook, elsewhere a line for each step.

A line has the step, the reward and the time left first; what does not fit the width is left out whole, from the right.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from mm_grpo.terminal import printable

# (label, the metrics that may hold it: the first that is there counts, how it is written); `left` stands for itself
SHOWN = (
    ("reward", ("reward",), "{:.3f}"),
    ("±", ("reward_std",), "{:.3f}"),  # within groups
    ("left", ("left",), "{}"),
    ("accuracy", ("accuracy", "rewards/accuracy/mean"), "{:.3f}"),
    ("zero spread", ("frac_reward_zero_std",), "{:.0%}"),  # groups whose rewards are all equal
    ("s/step", ("seconds",), "{:.1f}"),
    ("length", ("completions/mean_length",), "{:.1f}"),
    ("clipped", ("completions/clipped_ratio",), "{:.0%}"),
    ("sight", ("sight/nats",), "{:.2f}"),  # what images add to log-probs, in nats
    ("loss", ("loss",), "{:.4f}"),
    ("tokens/s", ("tokens_per_second",), "{:,.0f}"),
    ("kl", ("kl",), "{:.4f}"),
)
UNITS = ("left", "s/step", "tokens/s")
"""Labels that stand behind their values."""
LEAST_BAR = 5
"""Columns that a line leaves for the bar, with the space before it."""
SILENCE = 10.0
"""Seconds without a line after which a long evaluation prints how far it is, where there is no terminal."""
RECENT = 20
"""Steps, with the evaluations among them, by whose mean the time that is left is estimated."""
ROWS = 200
"""Rows of a notebook's table, which is sent anew with each step: the newest steps."""


class Progress:
    """Shows the steps up to `total`, of which `first` are done; use it as a context manager.

    It opens with `headline`. On a terminal it is a bar that stays at the bottom; elsewhere each step prints a line, so
    that a log file stays readable. `quiet` prints nothing: for processes other than the first. `tokens` are those of
    the steps that are done, of prompts and completions.
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
        self.step = first
        self._texts: list[str] = []
        self._last = self._printed = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._bar: Bar | None = None
        if self.console.is_terminal and not quiet:
            bar = BarColumn(None, table_column=Column(ratio=1))
            self._bar = Bar(_Line(self.console), bar, console=self.console, expand=True)
            parts = [f"step {first}/{total}"]
            self._task = self._bar.add_task("train", total=total, completed=first, parts=parts)

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
        self._print_texts()
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.stop()

    def begin(self) -> None:
        """The first step begins now: what came before it says nothing of the time that steps take."""
        self._last = time.monotonic()

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step `step`, counted from 1, is done. Its seconds are `step_time`, or the time since the last."""
        self.step = step
        if step > 0:
            self._show_step(step, metrics)
        self._print_texts()

    def _show_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._recent.append(now - self._last)
        seconds = metrics.get("step_time", now - self._last)
        self._last = now
        shown = {**metrics, "seconds": seconds}
        if (tokens := metrics.get("num_tokens")) is not None:
            shown["tokens_per_second"] = (tokens - self._tokens) / max(seconds, 1e-9)
            self._tokens = tokens
        if step < self.total:
            shown["left"] = duration((self.total - step) * sum(self._recent) / len(self._recent))
        self._show_values(step, describe(shown))

    def _show_values(self, step: int, found: Mapping[str, str]) -> None:
        """Show the values of a step by their labels."""
        words = [f"{text} {label}" if label in UNITS else f"{label} {text}" for label, text in found.items()]
        parts = [f"step {step}/{self.total}", *words]
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.update(self._task, completed=step, parts=parts)
        else:
            self.print(fit(parts, self.console.width))

    def print_after(self, text: str) -> None:
        """Print a line below that of the step that ends now."""
        self._texts.append(text)

    def _print_texts(self) -> None:
        while self._texts:
            self.print(self._texts.pop(0))

    def evaluating(self, name: str, done: int, total: int) -> None:
        """An evaluation after step `self.step` has answered `done` of the `total` rows of the set `name`."""
        words = f"evaluating {name} {done}/{total}" if done else f"evaluating {name}, {total} rows"
        if self._bar is not None:
            with self._while_there_is_a_terminal():
                self._bar.update(
                    self._task, completed=self.step, parts=[f"step {self.step}/{self.total}", words]
                )
        elif time.monotonic() - self._printed >= SILENCE:
            self.print(words)

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one; nothing in it is read as markup."""
        self._printed = time.monotonic()
        if not self._quiet:
            with self._while_there_is_a_terminal():
                # a terminal would break a long line within a word; a log file has it whole
                self.console.print(Text(printable(text)), soft_wrap=not self.console.is_terminal)

    @contextmanager
    def _while_there_is_a_terminal(self) -> Iterator[None]:
        """A terminal or a pipe that was closed ends the output, not the run."""
        try:
            yield
        except (OSError, SystemExit):  # rich exits where a pipe has no reader
            self._quiet = True
            self.console.quiet = True


class NotebookProgress(Progress):
    """Shows the steps as a table that grows in one output of a cell, and below it what is printed meanwhile."""

    def __init__(self, total: int, **options: Any) -> None:
        super().__init__(total, **options)
        self._rows = deque[dict[str, str]](maxlen=ROWS)
        self._lines: list[str] = []
        self._handle: Any = None

    def _show_values(self, step: int, found: Mapping[str, str]) -> None:
        self._rows.append({"step": f"{step}/{self.total}", **found})
        self._draw()

    def print(self, text: str) -> None:
        self._lines += text.splitlines()
        self._draw()

    def evaluating(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self._printed >= 1:
            self._draw(f"evaluating {name} {done}/{total}")

    def _draw(self, *status: str) -> None:
        """Show the table with the `status` below it, in the place of the one before."""
        if self._quiet:
            return
        from IPython.display import HTML, display

        self._printed = time.monotonic()
        columns = dict.fromkeys(label for row in self._rows for label in row)
        rows = [columns, *([row.get(label, "") for label in columns] for row in self._rows)]
        cells = ("".join(f"<td>{escape(printable(text))}</td>" for text in row) for row in rows)
        lines = "<br>".join(escape(printable(text)) for text in (*self._lines, *status))
        html = HTML(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>{lines}")
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)


def progress_of_run(total: int, **options: Any) -> Progress:
    """Return what shows the steps of a run here: a notebook's table, or a bar or lines."""
    return (NotebookProgress if Console().is_jupyter else Progress)(total, **options)


class _Line(ProgressColumn):
    """The parts of the newest step that fit beside the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        return Text(printable(fit(task.fields["parts"], self._console.width - LEAST_BAR), lines=False))


def describe(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The few numbers worth watching by their label, in the order in which they matter; a loss of ±0.0000 is none.

    >>> describe({"loss": 0.00001, "reward_std": 0.25, "reward": 0.5})
    {'reward': '0.500 ± 0.250'}
    """
    found: dict[str, str] = {}
    for label, keys, form in SHOWN:
        value = next((metrics[key] for key in keys if metrics.get(key) is not None), None)
        if value is None or (label == "loss" and form.format(abs(value)) == form.format(0)):
            continue
        name = "reward" if label == "±" and "reward" in found else label
        found[name] = f"{found[name]} ± {form.format(value)}" if name != label else form.format(value)
    return found


def fit(parts: Sequence[str], width: int) -> str:
    """As many of the first parts as fit the width, and the first one at least.

    >>> fit(["step 1/3", "reward 0.250", "2.0 s/step"], 22)
    'step 1/3  reward 0.250'
    """
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(42), duration(200), duration(7500)
    ('42 s', '3 min 20 s', '2 h 05 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
