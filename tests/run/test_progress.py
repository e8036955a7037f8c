"""What a run says on the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mm_grpo.run.progress import Progress, describe


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120, highlight=False, color_system=None), out


def test_a_step_in_words() -> None:
    metrics = {"reward": 0.41249, "loss": -0.00312, "kl": 0.1, "rewards/accuracy/mean": 0.5}
    assert describe(metrics, 1.94) == "reward 0.412  accuracy 0.500  loss -0.0031  1.9 s/step"
    metrics = {
        "reward": 0.5, "reward_std": 0.25, "frac_reward_zero_std": 0.125, "completions/mean_length": 31.25,
        "completions/clipped_ratio": 0.5,
    }  # fmt: skip
    assert (
        describe(metrics, 2.0)
        == "reward 0.500 ± 0.250  zero spread 12%  length 31.2  clipped 50%  2.0 s/step"
    )
    assert describe({"reward": None}, 0.04) == "0.0 s/step"


def test_without_a_terminal_each_step_is_a_line() -> None:
    where, out = console(terminal=False)
    with Progress(3, headline="8 prompts × 8 [generations]", console=where) as progress:
        progress.on_log(1, {"reward": 0.25, "step_time": 2.0, "num_tokens": 500})
        progress.print("[red]a guard warns[/red]")
        progress.on_log(2, {"reward": 0.5, "step_time": 1.5, "num_tokens": 3500})
        progress.on_log(3, {"reward": 0.5, "step_time": 1.5})
    assert out.getvalue().splitlines() == [
        "8 prompts × 8 [generations]",
        "step 1/3  reward 0.250  2.0 s/step  250 tokens/s  0 s left",
        "[red]a guard warns[/red]",
        "step 2/3  reward 0.500  1.5 s/step  2,000 tokens/s  0 s left",
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
        "step 1/101  2.0 s/step  4 min 10 s left",
    ]


def test_on_a_terminal_it_is_a_bar() -> None:
    shown = []
    for evaluates in (False, True):
        where, out = console(terminal=True)
        with Progress(4, first=1, console=where) as progress:
            progress.on_log(2, {"reward": 0.25, "step_time": 2.0})
            if evaluates:
                progress.evaluating("held", 120, 300)
        shown.append(out.getvalue())
    assert "2/4" in shown[0] and "reward 0.250  2.0 s/step" in shown[0] and "step 2/4  " not in shown[0]
    assert "evaluating held 120/300" in shown[1]


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_prints_nothing(terminal: bool) -> None:
    where, out = console(terminal)
    with Progress(2, headline="hello", quiet=True, console=where) as progress:
        progress.on_log(1, {"reward": 1.0})
        progress.print("anything")
    assert out.getvalue() == ""
