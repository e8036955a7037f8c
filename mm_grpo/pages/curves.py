"""The curves of a run, drawn in a bounded number of points however long the run is.

A metric's points are exact up to MOST_STRETCHES rows; of a longer run the lowest and the highest value of each stretch
stay, so that no spike is lost. CURVES says which metrics are drawn, and how: to add a curve, a line there. An
`ExpectedCurve` is one that was measured before (`run.expected_curve`, docs/recipes.md), which a page draws beside the
user's own.
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
"""A step and the value there; None where nothing was measured."""
MOST_STRETCHES = 320
MOST_LINES = 12
"""Metrics of one curve; what a reward logs under many names is no curve that can be read."""
LAST = 10
"""Rows at the end of a run that its numbers are means of."""


@dataclass(frozen=True)
class Curve:
    """One chart: the metrics whose whole name matches `pattern`; its group, if any, names the line.

    `limits` fix the ends of the y axis; a None is as high as the values. `smooth` adds the running mean. `least` is the
    number of lines from which the chart of one run is drawn.
    """

    title: str
    unit: str
    pattern: str
    limits: tuple[float, float | None] | None = None
    smooth: bool = False
    least: int = 1
    zeros: bool = False
    """Whether it is drawn where every value is 0; of the others the page then says so in words."""
    alone: str = ""
    """The one line that is drawn of each of several runs; empty is all."""


GAP = "sampling_logp_difference"
PHASES = "step_time|time/(?:data|rollout|rewards|learner|sync|log)"
CURVES = (
    Curve("Reward", "mean reward", r"reward", smooth=True, zeros=True),
    Curve("Evaluation accuracy", "share right", r"eval/(?:(.+)/)?accuracy", limits=(0, 1), zeros=True),
    Curve("Evaluation reward", "mean reward", r"eval/(?:(.+)/)?reward", zeros=True),
    Curve("Sight", "nats per completion", r"sight/nats", zeros=True),
    Curve("Reward parts", "mean score", r"rewards/(.+)/mean", least=2),
    Curve("Groups without a signal", "share of groups", r"frac_reward_zero_std", limits=(0, 1)),
    Curve("Completion length", "tokens", r"completions/(mean|min|max)_length", limits=(0, None)),
    Curve("Cut completions", "share of completions", r"completions/clipped_ratio", limits=(0, None)),
    Curve("Entropy", "nats per token", r"entropy", limits=(0, None)),
    Curve("KL to the reference", "nats", r"kl", limits=(0, None)),
    Curve("Log-prob gap", "nats per token", rf"sampling/{GAP}/(mean|max)", limits=(0, None)),
    Curve("Gradient norm", "norm", r"grad_norm", limits=(0, None)),
    Curve("Learning rate", "rate", r"learning_rate", limits=(0, None)),
    Curve("Calls of tools", "calls per conversation", r"tools/call_frequency", limits=(0, None)),
    Curve("Step time by phase", "seconds", rf"({PHASES})", limits=(0, None), alone="whole step"),
    Curve("Evaluation time", "seconds", r"time/eval", limits=(0, None)),
    Curve("Tokens per second", "tokens/s", r"tokens_per_second", limits=(0, None)),
)


def thinned(points: Sequence[Point]) -> dict[str, Any]:
    """The points of a line as a page holds them; of a long run, of each stretch the lowest, the highest and the mean.

    `points` has (step, None) where nothing was measured. `means`, at the last step of each stretch, and `width`, the
    rows of a stretch, are there for a long run alone.
    """
    width = -(-len(points) // MOST_STRETCHES)
    if width <= 1:
        return {"points": list(points)}
    kept, means = list[Point](), list[Point]()
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        known = [(x, y) for x, y in stretch if y is not None]
        ends = {min(known, key=itemgetter(1)), max(known, key=itemgetter(1))} if known else {stretch[-1]}
        kept += sorted(ends)
        means.append((stretch[-1][0], sum(y for _, y in known) / len(known) if known else None))
    return {"points": kept, "means": means, "width": width}


class Curves:
    """The lines of one run's charts, and the numbers at the top of its page, from the rows of its metrics.jsonl."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.lines: list[dict[str, list[Point]]] = [{} for _ in CURVES]
        """By curve, and by the name of the line."""
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
            self._take(row["step"], values)
            if row["step"] > 0:
                tokens = total

    def _take(self, step: int, values: Mapping[str, float | None]) -> None:
        self.last_step = step
        for name, found in (("reward", self.rewards), ("step_time", self.seconds)):
            if (value := values.get(name)) is not None:
                found.append(value)
        if measured := {n: v for n, v in values.items() if n.startswith("eval/") and v is not None}:
            self.evaluations.append(measured | {"step": step})
        for name, value in values.items():
            for place, label in places_of(name):
                lines = self.lines[place]
                if label in lines or len(lines) < MOST_LINES:
                    lines.setdefault(label, []).append((step, value))

    def numbers(self) -> dict[str, Any]:
        """What the cards at the top of the page are made of."""
        last = self.rewards[-LAST:]
        return {
            "last_step": self.last_step,
            "reward": sum(last) / len(last) if last else None,
            "reward_steps": len(last),
            "first_reward": self.rewards[0] if last else None,
            "step_seconds": sum(self.seconds) / len(self.seconds) if self.seconds else None,
            "first_evaluation": self.evaluations[0] if self.evaluations else {},
            "last_evaluation": self.evaluations[-1] if self.evaluations else {},
        }


@functools.lru_cache(10_000)
def places_of(metric: str) -> list[tuple[int, str]]:
    """The places in CURVES of those that draw a metric, with the name of its line there.

    >>> [(CURVES[place].title, line) for place, line in places_of("eval/heldout/accuracy")]
    [('Evaluation accuracy', 'heldout')]
    """
    found = []
    for place, curve in enumerate(CURVES):
        if match := re.fullmatch(curve.pattern, metric):
            label = (match[1] if match.re.groups else None) or curve.title.lower()
            found.append((place, label.removeprefix("time/").replace("step_time", "whole step")))
    return found


def _number(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None


class ExpectedCurve(BaseModel):
    """A metric's values at some steps of a run that was measured before; 0 is before the first.

    `source` says where the figures are from: hardware, seeds, what else ran.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    metric: str
    steps: tuple[int, ...] = Field(min_length=1)
    values: tuple[float, ...]
    source: str

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.values) != len(self.steps):
            raise ValueError("there must be as many values as steps")
        if not places_of(self.metric):
            raise ValueError(
                f"report.html draws no {self.metric!r}; name reward, eval/<set>/accuracy or another"
            )
        return self


def read_expected_curve(path: str | PathLike[str]) -> ExpectedCurve:
    """The curve in a file. ConfigError when there is none, or none that a page draws."""
    try:
        return ExpectedCurve.model_validate_json(read_regular_file(Path(path)))
    except (OSError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"run.expected_curve = '{path}': cannot be read: {reason}") from None
