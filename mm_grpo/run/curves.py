"""The curves of a run, kept in a bounded number of points however long the run is.

`Curves.take` is given each row of metrics.jsonl once. A metric's points are exact up to MOST_BUCKETS rows; from then on
neighbouring points share a bucket, whose lowest and highest value stay, so that no spike is lost. Buckets double as the
run goes on. CURVES says which metrics are drawn, and how: to add a curve, a line there.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.run.charts import Point

MOST_BUCKETS = 320
MOST_LINES = 12
"""Metrics of one curve; what a reward logs under many names is no curve that can be read."""
LAST = 10
"""Rows at the end of a run that its numbers are means of."""


@dataclass(frozen=True)
class Curve:
    """One chart: the metrics whose whole name matches `pattern`; its group, if any, names the line.

    `limits` fix the ends of the y axis; a None is as high as the values. `smooth` adds the running
    mean. `least` is the number of lines from which the chart is drawn.
    """

    title: str
    unit: str
    pattern: str
    limits: tuple[float, float | None] | None = None
    smooth: bool = False
    least: int = 1
    before: bool = False
    """Whether summary.json may know the value before the first step."""
    zeros: bool = False
    """Whether it is drawn where every value is 0; of the others the page then says so in words."""
    alone: str = ""
    """The one line that is drawn of each of several runs; empty is all."""


PHASES = "step_time|time/(?:data|rollout|rewards|learner|sync|log)"
CURVES = (
    Curve("Reward", "mean reward", r"reward", smooth=True, zeros=True),
    Curve(
        "Evaluation accuracy",
        "share right",
        r"eval(?:[/_](.+))?[/_]accuracy",
        limits=(0, 1),
        before=True,
        zeros=True,
    ),
    Curve("Evaluation reward", "mean reward", r"eval(?:[/_](.+))?[/_]reward", zeros=True),
    Curve("Sight", "nats per completion", r"sight/nats", zeros=True),
    Curve("Reward parts", "mean score", r"rewards/(.+)/mean", least=2),
    Curve("Groups without a signal", "share of groups", r"frac_reward_zero_std", limits=(0, 1)),
    Curve("Completion length", "tokens", r"completions/(mean|min|max)_length", limits=(0, None)),
    Curve("Cut completions", "share of completions", r"completions/clipped_ratio", limits=(0, None)),
    Curve("Entropy", "nats per token", r"entropy", limits=(0, None)),
    Curve("KL to the reference", "nats", r"kl", limits=(0, None)),
    Curve(
        "Log-prob gap", "nats per token", r"sampling/sampling_logp_difference/(mean|max)", limits=(0, None)
    ),
    Curve("Gradient norm", "norm", r"grad_norm", limits=(0, None)),
    Curve("Learning rate", "rate", r"learning_rate", limits=(0, None)),
    Curve("Calls of tools", "calls per conversation", r"tools/call_frequency", limits=(0, None)),
    Curve("Step time by phase", "seconds", rf"({PHASES})", limits=(0, None), alone="whole step"),
    Curve("Evaluation time", "seconds", r"time/eval", limits=(0, None)),
    Curve("Tokens per second", "tokens/s", r"tokens_per_second", limits=(0, None)),
)


@dataclass(slots=True)
class Bucket:
    """Neighbouring points of one metric: `count` of `rows` rows had a value."""

    rows: int = 0
    count: int = 0
    total: float = 0.0
    x: float = 0.0
    low: tuple[float, float] = (0.0, 0.0)
    high: tuple[float, float] = (0.0, 0.0)

    def add(self, x: float, y: float | None) -> None:
        """Take one more row in, whose value is not known where `y` is None."""
        self.rows += 1
        if not self.count:
            self.x = x
        if y is None:
            return
        if not self.count or y < self.low[1]:
            self.low = (x, y)
        if not self.count or y > self.high[1]:
            self.high = (x, y)
        self.count, self.total, self.x = self.count + 1, self.total + y, x

    def join(self, other: Bucket) -> None:
        """Take in the bucket that follows."""
        if other.count:
            self.low = min(self.low, other.low, key=lambda p: p[1]) if self.count else other.low
            self.high = max(self.high, other.high, key=lambda p: p[1]) if self.count else other.high
            self.x = other.x
        self.rows, self.count, self.total = (
            self.rows + other.rows,
            self.count + other.count,
            self.total + other.total,
        )


@dataclass
class Trace:
    """The points of one metric."""

    buckets: list[Bucket] = field(default_factory=list)
    width: int = 1
    """Rows of a full bucket."""

    def add(self, x: float, y: float | None) -> None:
        """Take the value of one more row, in the order of the steps."""
        if not self.buckets or self.buckets[-1].rows >= self.width:
            if len(self.buckets) >= MOST_BUCKETS:
                for first, second in zip(self.buckets[::2], self.buckets[1::2], strict=True):
                    first.join(second)
                self.buckets = self.buckets[::2]
                self.width *= 2
            self.buckets.append(Bucket())
        self.buckets[-1].add(x, y)

    @property
    def points(self) -> tuple[Point, ...]:
        """Each value, or of each bucket the lowest and the highest; (step, None) where nothing was measured."""
        found: list[Point] = []
        for bucket in self.buckets:
            found += sorted({bucket.low, bucket.high}) if bucket.count else [(bucket.x, None)]
        return tuple(found)

    @property
    def means(self) -> tuple[Point, ...]:
        """The mean of each bucket at its last step."""
        return tuple((b.x, b.total / b.count if b.count else None) for b in self.buckets)


class Curves:
    """What the rows of one run's metrics.jsonl leave for a report."""

    def __init__(self) -> None:
        self.traces: list[dict[str, Trace]] = [{} for _ in CURVES]
        """By curve, and by the name of the line."""
        self.last_step: int | None = None
        self.first_reward: float | None = None
        self.rewards: deque[float] = deque(maxlen=LAST)
        self.seconds, self.timed = 0.0, 0
        self.first_evaluation: dict[str, float] = {}
        """The metrics under eval/ of the first row that has any; `last_evaluation` those of the last."""
        self.last_evaluation: dict[str, float] = {}
        self._tokens: float | None = 0.0
        self._places: dict[str, list[tuple[int, str]]] = {}

    def take(self, row: Mapping[str, Any]) -> None:
        """One more row of metrics.jsonl, in the order of the steps."""
        step = row["step"]
        self.last_step = step
        if (reward := _number(row.get("reward"))) is not None:
            self.first_reward = reward if self.first_reward is None else self.first_reward
            self.rewards.append(reward)
        seconds, tokens = _number(row.get("step_time")), _number(row.get("num_tokens"))
        if seconds is not None:
            self.seconds, self.timed = self.seconds + seconds, self.timed + 1
        evaluation = {n: v for n in row if n.startswith("eval/") and (v := _number(row[n])) is not None}
        if evaluation:
            self.first_evaluation = self.first_evaluation or evaluation
            self.last_evaluation = evaluation
        for name, value in row.items():
            for curve, label in self._places_of(name):
                self._trace(curve, label, step, _number(value))
        if seconds and tokens is not None and self._tokens is not None:
            for curve, label in self._places_of("tokens_per_second"):
                self._trace(curve, label, step, (tokens - self._tokens) / seconds)
        if step > 0:
            self._tokens = tokens

    def _trace(self, curve: int, label: str, step: int, value: float | None) -> None:
        traces = self.traces[curve]
        if label not in traces and len(traces) >= MOST_LINES:
            return
        traces.setdefault(label, Trace()).add(step, value)

    def _places_of(self, name: str) -> Sequence[tuple[int, str]]:
        """The curves that a metric belongs to, with its name there."""
        if (known := self._places.get(name)) is not None:
            return known
        found = places_of(name)
        if len(self._places) < 10_000:
            self._places[name] = found
        return found


def places_of(metric: str) -> list[tuple[int, str]]:
    """The places in CURVES of those that draw a metric, with the name of its line there.

    >>> [(CURVES[place].title, line) for place, line in places_of("eval/heldout/accuracy")]
    [('Evaluation accuracy', 'heldout')]
    """
    return [
        (
            i,
            ((match[1] if match.re.groups else None) or curve.title.lower())
            .removeprefix("time/")
            .replace("step_time", "whole step"),
        )
        for i, curve in enumerate(CURVES)
        if (match := re.fullmatch(curve.pattern, metric))
    ]


def _number(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None
