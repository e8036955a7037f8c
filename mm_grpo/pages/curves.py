"""Curves of a run, in a limited number of points.

All points are drawn up to MAX_STRETCHES rows. A longer run is cut into stretches, of which the lowest and the highest
value are drawn, so that no spike is lost. To add a curve: a line in CURVES. An `ExpectedCurve` was measured before
(`run.expected_curve`, docs/recipes.md); a page draws it with the run's own.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file

Point = tuple[float, float | None]
"""(step, value); the value is None if nothing was measured."""
MAX_STRETCHES = 320
MAX_LINES = 12  # lines of one chart; more could not be told apart
LAST_ROWS = 10  # rows at the end of a run that its numbers are means of


@dataclass(frozen=True)
class Curve:
    """Chart of some metrics."""

    title: str
    unit: str
    pattern: str  # matches whole names of metrics; its group, if any, is the name of the line
    limits: tuple[float, float | None] | None = None  # ends of the y axis; None is the largest value
    smooth: bool = False  # draw the running mean too
    min_lines: int = 1  # fewest lines of one run for which the chart is drawn
    zeros: bool = False  # draw the chart even if all values are 0
    compared: str = ""  # the only line that is drawn of each of several runs; empty for all lines


GAP = "sampling_logp_difference"
PHASES = "step_time|time/(?:data|rollout|rewards|learner|sync|log)"
CURVES = (
    Curve("Reward", "mean reward", r"reward", smooth=True, zeros=True),
    Curve("Evaluation accuracy", "share right", r"eval/(?:(.+)/)?accuracy", limits=(0, 1), zeros=True),
    Curve("Evaluation reward", "mean reward", r"eval/(?:(.+)/)?reward", zeros=True),
    Curve("Sight", "nats per completion", r"sight/(?:(order)_)?nats", zeros=True),
    Curve("Reward parts", "mean score", r"rewards/(.+)/mean", min_lines=2),
    Curve("Groups without a signal", "share of groups", r"frac_reward_zero_std", limits=(0, 1)),
    Curve("Completion length", "tokens", r"completions/(mean|min|max)_length", limits=(0, None)),
    Curve("Cut completions", "share of completions", r"completions/clipped_ratio", limits=(0, None)),
    Curve("Entropy", "nats per token", r"entropy", limits=(0, None)),
    Curve("KL to the reference", "nats", r"kl", limits=(0, None)),
    Curve("Log-prob gap", "nats per token", rf"sampling/{GAP}/(mean|max)", limits=(0, None)),
    Curve("Gradient norm", "norm", r"grad_norm", limits=(0, None)),
    Curve("Learning rate", "rate", r"learning_rate", limits=(0, None)),
    Curve("Calls of tools", "calls per conversation", r"tools/call_frequency", limits=(0, None)),
    Curve("Step time by phase", "seconds", rf"({PHASES})", limits=(0, None), compared="whole step"),
    Curve("Evaluation time", "seconds", r"time/eval", limits=(0, None)),
    Curve("Tokens per second", "tokens/s", r"tokens_per_second", limits=(0, None)),
)


def thin_out(points: Sequence[Point]) -> dict[str, Any]:
    """Return the `points` of a line, of a long run only the lowest and the highest of each stretch.

    A long run also has `means`, each at the last step of a stretch, and `width`, the rows of a stretch.
    """
    width = -(-len(points) // MAX_STRETCHES)
    if width <= 1:
        return {"points": list(points)}
    extremes, means = list[Point](), list[Point]()
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        measured = [(x, y) for x, y in stretch if y is not None]
        values = [y for _, y in measured]
        low_and_high = {f(measured, key=itemgetter(1)) for f in (min, max)} if values else {stretch[-1]}
        extremes += sorted(low_and_high)
        means.append((stretch[-1][0], sum(values) / len(values) if values else None))
    return {"points": extremes, "means": means, "width": width}


class Curves:
    """Lines of one run's charts and numbers of its cards, from the rows of metrics.jsonl."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.lines: list[dict[str, list[Point]]] = [{} for _ in CURVES]
        """For each curve: name of the line -> points."""
        self.last_step: int | None = None
        self.rewards: list[float] = []
        self.seconds: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        """Step and metrics under eval/ of each row that has any."""
        tokens: float | None = 0.0
        for row in rows:
            values = {name: _number(value) for name, value in row.items()}
            seconds, total = values.get("step_time"), values.get("num_tokens")
            if seconds and total is not None and tokens is not None:
                values["tokens_per_second"] = (total - tokens) / seconds
            self._add(row["step"], values)
            if row["step"] > 0:
                tokens = total

    def _add(self, step: int, values: Mapping[str, float | None]) -> None:
        self.last_step = step
        for name, history in (("reward", self.rewards), ("step_time", self.seconds)):
            if (value := values.get(name)) is not None:
                history.append(value)
        if measured := {n: v for n, v in values.items() if n.startswith("eval/") and v is not None}:
            self.evaluations.append(measured | {"step": step})
        for name, value in values.items():
            for index, label in curves_of(name):
                lines = self.lines[index]
                if label in lines or len(lines) < MAX_LINES:
                    lines.setdefault(label, []).append((step, value))

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the cards at the top of the page."""
        last_rewards = self.rewards[-LAST_ROWS:]
        return {
            "last_step": self.last_step,
            "reward": sum(last_rewards) / len(last_rewards) if last_rewards else None,
            "reward_steps": len(last_rewards),
            "first_reward": self.rewards[0] if last_rewards else None,
            "step_seconds": sum(self.seconds) / len(self.seconds) if self.seconds else None,
            "first_evaluation": self.evaluations[0] if self.evaluations else {},
            "last_evaluation": self.evaluations[-1] if self.evaluations else {},
        }


@functools.lru_cache(10_000)
def curves_of(metric: str) -> list[tuple[int, str]]:
    """Return the indices in CURVES of the charts that draw a metric, with the name of its line.

    >>> [(CURVES[index].title, line) for index, line in curves_of("eval/heldout/accuracy")]
    [('Evaluation accuracy', 'heldout')]
    """
    matches = []
    for index, curve in enumerate(CURVES):
        if match := re.fullmatch(curve.pattern, metric):
            label = (match[1] if match.re.groups else None) or curve.title.lower()
            matches.append((index, label.removeprefix("time/").replace("step_time", "whole step")))
    return matches


def _number(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None."""
    is_drawable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_drawable else None


class ExpectedCurve(BaseModel):
    """Values of a metric in an earlier, measured run."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    metric: str
    steps: tuple[int, ...] = Field(min_length=1)  # 0 is before the first step
    values: tuple[float, ...]  # after each of these steps
    source: str  # origin of the figures: hardware, seeds, what else ran

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.values) != len(self.steps):
            raise ValueError("there must be as many values as steps")
        if not curves_of(self.metric):
            raise ValueError(
                f"report.html draws no {self.metric!r}; name reward, eval/<set>/accuracy or another"
            )
        return self


def read_expected_curve(path: str | PathLike[str]) -> ExpectedCurve:
    """Read the curve in a file. Raises ConfigError if it cannot be read or no page draws its metric."""
    try:
        return ExpectedCurve.model_validate_json(read_regular_file(Path(path)))
    except (OSError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"run.expected_curve = '{path}': cannot be read: {reason}") from None
