"""Progress of a run: a bar on a terminal, a table in a notebook, elsewhere a line for each step.

A line begins with the step, the reward and the time left; values that do not fit the width are left out at the end.
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

# (label, metrics of which the first one present is shown, format)
COLUMNS = (
    ("reward", ("reward",), "{:.3f}"),
    ("±", ("reward_std",), "{:.3f}"),  # within groups
    ("left", ("left",), "{}"),
    ("accuracy", ("accuracy", "rewards/accuracy/mean"), "{:.3f}"),
    ("zero spread", ("frac_reward_zero_std",), "{:.0%}"),  # groups whose rewards are all equal
    ("s/step", ("seconds",), "{:.1f}"),
    ("length", ("completions/mean_length",), "{:.1f}"),
    ("clipped", ("completions/clipped_ratio",), "{:.0%}"),
    ("sight", ("sight/nats",), "{:.2f}"),  # what media add to log-probs, in nats
    ("order", ("sight/order_nats",), "{:.2f}"),  # what the order of frames adds
    ("loss", ("loss",), "{:.4f}"),
    ("tokens/s", ("tokens_per_second",), "{:,.0f}"),
    ("kl", ("kl",), "{:.4f}"),
)
UNITS = ("left", "s/step", "tokens/s")
"""Labels that are written behind their values."""
MIN_BAR = 5
"""Characters of a line for the bar, with the space before it."""
MAX_SILENCE = 10.0
"""Seconds without a line after which an evaluation prints its progress, if there is no terminal."""
RECENT_STEPS = 20
"""Steps from which the time left is estimated."""
TABLE_ROWS = 200
"""Newest steps in a notebook's table, which is sent again with each step."""


class Progress:
    """Display of the steps up to `total`, of which `first` are done; a context manager.

    It opens with `headline`. On a terminal a bar stays at the bottom; elsewhere each step prints a line. `quiet`
    prints nothing (processes other than the first). `tokens` counts prompts and completions of the done steps.
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
        self._pending_lines: list[str] = []
        self._last_step = self._last_line = time.monotonic()
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._bar: Bar | None = None
        if self.console.is_terminal and not quiet:
            bar = BarColumn(None, table_column=Column(ratio=1))
            self._bar = Bar(_StepColumn(self.console), bar, console=self.console, expand=True)
            parts = [f"step {first}/{total}"]
            self._task = self._bar.add_task("train", total=total, completed=first, parts=parts)

    def __enter__(self) -> Self:
        self.begin()
        if self._headline:
            self.print(self._headline)
        if self._bar is not None:
            with self._ignore_closed_output():
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print_pending()
        if self._bar is not None:
            with self._ignore_closed_output():
                self._bar.stop()

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._last_step = time.monotonic()

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show step `step`, from 1. Its seconds are `step_time`, or the time since the last step."""
        self.step = step
        if step > 0:
            self._show_step(step, metrics)
        self._print_pending()

    def _show_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        elapsed = time.monotonic() - self._last_step
        self.begin()
        self._recent_seconds.append(elapsed)
        seconds = metrics.get("step_time", elapsed)
        values = {**metrics, "seconds": seconds}
        if (tokens := metrics.get("num_tokens")) is not None:
            values["tokens_per_second"] = (tokens - self._tokens) / max(seconds, 1e-9)
            self._tokens = tokens
        if step < self.total:
            mean = sum(self._recent_seconds) / len(self._recent_seconds)
            values["left"] = duration((self.total - step) * mean)
        self._show_values(step, describe(values))

    def _show_values(self, step: int, values: Mapping[str, str]) -> None:
        """Show the values of a step, by label."""
        words = [f"{text} {label}" if label in UNITS else f"{label} {text}" for label, text in values.items()]
        parts = [f"step {step}/{self.total}", *words]
        if self._bar is None:
            self.print(fit(parts, self.console.width))
        else:
            self._update_bar(step, parts)

    def _update_bar(self, step: int, parts: Sequence[str]) -> None:
        if self._bar is not None:
            with self._ignore_closed_output():
                self._bar.update(self._task, completed=step, parts=parts)

    def print_after(self, text: str) -> None:
        """Print a line below the line of the current step."""
        self._pending_lines.append(text)

    def _print_pending(self) -> None:
        while self._pending_lines:
            self.print(self._pending_lines.pop(0))

    def evaluating(self, name: str, done: int, total: int) -> None:
        """Show that an evaluation has answered `done` of the `total` rows of the set `name`."""
        text = f"evaluating {name} {done}/{total}" if done else f"evaluating {name}, {total} rows"
        self._update_bar(self.step, [f"step {self.step}/{self.total}", text])
        if self._bar is None and time.monotonic() - self._last_line >= MAX_SILENCE:
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line without markup, above the bar if there is one."""
        self._last_line = time.monotonic()
        if not self._quiet:
            with self._ignore_closed_output():
                # a terminal would break a long line within a word; a log file has it whole
                self.console.print(Text(printable(text)), soft_wrap=not self.console.is_terminal)

    @contextmanager
    def _ignore_closed_output(self) -> Iterator[None]:
        """Stop printing if the terminal or the pipe was closed; the run goes on."""
        try:
            yield
        except (OSError, SystemExit):  # rich exits if a pipe has no reader
            self._quiet = True
            self.console.quiet = True


class NotebookProgress(Progress):
    """Display of the steps as a growing table in a cell's output, with printed lines below it."""

    def __init__(self, total: int, **options: Any) -> None:
        super().__init__(total, **options)
        self._rows = deque[dict[str, str]](maxlen=TABLE_ROWS)
        self._lines: list[str] = []
        self._handle: Any = None

    def _show_values(self, step: int, values: Mapping[str, str]) -> None:
        self._rows.append({"step": f"{step}/{self.total}", **values})
        self._draw()

    def print(self, text: str) -> None:
        self._lines += text.splitlines()
        self._draw()

    def evaluating(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self._last_line >= 1:
            self._draw(f"evaluating {name} {done}/{total}")

    def _draw(self, *status: str) -> None:
        """Replace the table by a new one, with the `status` below it."""
        if self._quiet:
            return
        from IPython.display import HTML, display

        self._last_line = time.monotonic()
        labels = ("step", *(label for label, *_ in COLUMNS))
        columns = [label for label in labels if any(label in row for row in self._rows)]
        rows = [columns, *([row.get(label, "") for label in columns] for row in self._rows)]
        cells = ("".join(f"<td>{escape(printable(text))}</td>" for text in row) for row in rows)
        lines = "<br>".join(escape(printable(text)) for text in (*self._lines, *status))
        html = HTML(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>{lines}")
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)


def progress_of_run(total: int, **options: Any) -> Progress:
    """Return a NotebookProgress in a notebook, else a Progress."""
    return (NotebookProgress if Console().is_jupyter else Progress)(total, **options)


class _StepColumn(ProgressColumn):
    """Column of the bar's line with the parts of the newest step that fit."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        return Text(printable(fit(task.fields["parts"], self._console.width - MIN_BAR), lines=False))


def describe(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return label -> formatted value of the most important metrics; a loss of ±0.0000 is left out.

    >>> describe({"loss": 0.00001, "reward_std": 0.25, "reward": 0.5})
    {'reward': '0.500 ± 0.250'}
    """
    values: dict[str, str] = {}
    for label, keys, form in COLUMNS:
        value = next((metrics[key] for key in keys if metrics.get(key) is not None), None)
        if value is None or (label == "loss" and form.format(abs(value)) == form.format(0)):
            continue
        if label == "±" and "reward" in values:
            values["reward"] += f" ± {form.format(value)}"
        else:
            values[label] = form.format(value)
    return values


def fit(parts: Sequence[str], width: int) -> str:
    """Join the first part and as many of the next ones as fit the width.

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
    """Write seconds in words.

    >>> duration(42), duration(200), duration(7500)
    ('42 s', '3 min 20 s', '2 h 05 min')
    """
    minutes, seconds = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{seconds} s"
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
