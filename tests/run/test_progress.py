"""What a run says on the terminal, and in a notebook."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mm_grpo.run.progress import Progress, describe, progress_of_run

METRICS = {
    "reward": 0.2664, "reward_std": 0.4261, "frac_reward_zero_std": 0.125, "completions/mean_length": 31.25,
    "completions/clipped_ratio": 0.5, "loss": -0.00004, "sight/nats": 1.25, "step_time": 1.9, "num_tokens": 5000,
}  # fmt: skip


def console(terminal: bool, width: int = 120) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=width, highlight=False, color_system=None), out


def test_a_step_in_words() -> None:
    metrics = {"reward": 0.41249, "loss": -0.00312, "kl": 0.1, "rewards/accuracy/mean": 0.5, "seconds": 1.94}
    assert [*describe(metrics).items()] == [
        ("reward", "0.412"), ("accuracy", "0.500"), ("s/step", "1.9"), ("loss", "-0.0031"),
        ("kl", "0.1000"),
    ]  # fmt: skip
    assert describe(METRICS) == {
        "reward": "0.266 ± 0.426", "zero spread": "12%", "length": "31.2", "clipped": "50%", "sight": "1.25"
    }  # fmt: skip
    assert describe({"reward": None, "seconds": 0.04}) == {"s/step": "0.0"}


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("width", "last"),
    [(40, "0.426"), (120, "clipped 50%"), (200, "tokens/s")],
)
def test_what_does_not_fit_is_left_out_whole(
    terminal: bool, width: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `width` columns the parts are there up to `last` at least."""
    monkeypatch.setattr("mm_grpo.run.progress.time.monotonic", lambda: 100.0)
    where, out = console(terminal, width)
    with Progress(600, console=where) as progress:
        progress.on_log(46, METRICS)
    lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", out.getvalue())
    line = [each for each in lines if each.startswith("step 46")][-1]
    shown = line.rstrip(" ━╸╺")
    whole = (
        "step 46/600  reward 0.266 ± 0.426  0 s left  zero spread 12%  1.9 s/step  length 31.2  clipped 50%"
    )
    whole += "  sight 1.25  2,632 tokens/s"
    assert len(line) <= width and last in shown and (shown + "  " in whole or shown == whole)


def test_without_a_terminal_each_step_is_a_line() -> None:
    where, out = console(terminal=False)
    with Progress(3, headline="8 prompts × 8 [generations]", console=where) as progress:
        progress.on_log(1, {"reward": 0.25, "step_time": 2.0, "num_tokens": 500})
        progress.print("[red]a guard warns[/red]")
        progress.on_log(2, {"reward": 0.5, "step_time": 1.5, "num_tokens": 3500})
        progress.on_log(3, {"reward": 0.5, "step_time": 1.5})
    assert out.getvalue().splitlines() == [
        "8 prompts × 8 [generations]",
        "step 1/3  reward 0.250  0 s left  2.0 s/step  250 tokens/s",
        "[red]a guard warns[/red]",
        "step 2/3  reward 0.500  0 s left  1.5 s/step  2,000 tokens/s",
        "step 3/3  reward 0.500  1.5 s/step",
    ]
    assert out.getvalue().replace("\n", "").isprintable()


def test_the_time_that_is_left_and_a_long_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mm_grpo.run.progress.time.monotonic", lambda: now[0])
    where, out = console(terminal=False)
    with Progress(101, console=where) as progress:
        now[0] = 150.0  # an evaluation, whose time says nothing of the steps'
        progress.evaluating("held", 64, 300)
        now[0] = 155.0
        progress.evaluating("held", 128, 300)  # a line was printed 5 s ago
        progress.begin()
        now[0] = 157.5
        progress.on_log(1, {"step_time": 2.0})
    assert out.getvalue().splitlines() == [
        "evaluating held 64/300",
        "step 1/101  4 min 10 s left  2.0 s/step",
    ]


def test_a_notebook_has_one_table_that_grows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    calls: list[Any] = []

    def display(html: str, display_id: bool) -> Any:
        calls.append(display_id)
        shown.append(html)
        return handle

    monkeypatch.setattr("builtins.get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    module = SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    with progress_of_run(300, headline="8 prompts\n4 generations") as progress:
        progress.print("<b>accuracy</b> 0.25")
        for step in range(1, 301):
            progress.on_log(step, {"reward": step / 1000, "kl": 0.5, "step_time": 2.0})
            progress.evaluating("heldout", step, 300)
    assert calls == [True] and len(shown) == 302 and capsys.readouterr().out == ""
    assert [re.findall("<td>([^<]*)", row) for row in shown[2].split("<tr>")[1:]] == [
        ["step", "reward", "left", "s/step", "kl"],
        ["1/300", "0.001", "0 s", "2.0", "0.5000"],
    ]
    assert shown[2].endswith("</table>8 prompts<br>4 generations<br>&lt;b&gt;accuracy&lt;/b&gt; 0.25")
    rows = re.findall("<td>([^<]*)/300</td><td>([^<]*)", shown[-1])
    assert (rows[0], rows[-1]) == (("101", "0.101"), ("300", "0.300"))


@pytest.mark.parametrize("shell", [None, "TerminalInteractiveShell"])
def test_elsewhere_a_run_prints_lines(shell: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if shell is not None:
        monkeypatch.setattr("builtins.get_ipython", type(shell, (), {}), raising=False)
    assert type(progress_of_run(3)) is Progress
