"""The curves of a run, kept in a bounded number of points however long the run is.

`Curves.take` is given each row of metrics.jsonl once. A metric's points are exact up to MOST_BUCKETS rows; from then on
neighbouring points share a bucket, whose lowest and highest value stay, so that no spike is lost. Buckets double as the
run goes on. CURVES says which metrics are drawn, and how: to add a curve, a line there. An `ExpectedCurve` is one that
was measured before (`run.expected_curve`, docs/recipes.md), which a page draws beside the user's own.
"""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file
from mm_grpo.terminal import printable

Point = tuple[float, float | None]
"""A step and the value there; None where nothing was measured."""
MOST_BUCKETS = 320
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


@dataclass(slots=True)
class Bucket:
    """Neighbouring rows of one metric, of which `count` had a value: the last step, the sum, and both ends."""

    rows: int
    count: int
    x: float
    total: float
    ends: tuple[tuple[float, float], ...]
    """(step, value) of the lowest and of the highest; of one value once."""

    @classmethod
    def of(cls, x: float, y: float | None) -> Bucket:
        """One row, whose value is not known where `y` is None."""
        return cls(1, 0, x, 0.0, ()) if y is None else cls(1, 1, x, y, ((x, y),))

    def join(self, other: Bucket) -> Bucket:
        """This bucket with the one that follows."""
        ends = (*self.ends, *other.ends)
        if ends:
            ends = tuple({min(ends, key=itemgetter(1)): None, max(ends, key=itemgetter(1)): None})
        x = other.x if other.count or not self.count else self.x
        return Bucket(self.rows + other.rows, self.count + other.count, x, self.total + other.total, ends)


@dataclass
class Trace:
    """The points of one metric."""

    buckets: list[Bucket] = field(default_factory=list)
    width: int = 1
    """Rows of a full bucket."""

    def add(self, x: float, y: float | None) -> None:
        """Take the value of one more row, in the order of the steps."""
        one, buckets = Bucket.of(x, y), self.buckets
        if buckets and buckets[-1].rows < self.width:
            buckets[-1] = buckets[-1].join(one)
            return
        if len(buckets) >= MOST_BUCKETS:
            self.buckets = [a.join(b) for a, b in zip(buckets[::2], buckets[1::2], strict=True)]
            self.width *= 2
        self.buckets.append(one)

    @property
    def points(self) -> list[Point]:
        """Each value, or of each bucket the lowest and the highest; (step, None) where nothing was measured."""
        found: list[Point] = []
        for bucket in self.buckets:
            found += sorted(bucket.ends) if bucket.count else [(bucket.x, None)]
        return found

    @property
    def means(self) -> list[Point]:
        """The mean of each bucket at its last step."""
        return [(b.x, b.total / b.count if b.count else None) for b in self.buckets]


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
        """Step and metrics under eval/ of the first row that has any; `last_evaluation` those of the last."""
        self.last_evaluation: dict[str, float] = {}
        self._tokens: float | None = 0.0

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
            evaluation["step"] = step
            self.first_evaluation = self.first_evaluation or evaluation
            self.last_evaluation = evaluation
        values = {name: _number(value) for name, value in row.items()}
        if seconds and tokens is not None and self._tokens is not None:
            values["tokens_per_second"] = (tokens - self._tokens) / seconds
        for name, value in values.items():
            for place, label in places_of(name):
                traces = self.traces[place]
                if label in traces or len(traces) < MOST_LINES:
                    traces.setdefault(label, Trace()).add(step, value)
        if step > 0:
            self._tokens = tokens

    def numbers(self) -> dict[str, Any]:
        """What the cards at the top of the page are made of."""
        rewards = self.rewards
        return {
            "last_step": self.last_step,
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "reward_steps": len(rewards),
            "first_reward": self.first_reward,
            "step_seconds": self.seconds / self.timed if self.timed else None,
            "first_evaluation": self.first_evaluation,
            "last_evaluation": self.last_evaluation,
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


Name = Annotated[str, Field(min_length=1)]


class ExpectedCurve(BaseModel):
    """A metric's values at some steps of a run that was measured before; 0 is before the first.

    `source` says where the figures are from: hardware, seeds, what else ran.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    metric: Name
    steps: tuple[NonNegativeInt, ...] = Field(min_length=1)
    values: tuple[float, ...]
    source: Name

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if any(b <= a for a, b in pairwise(self.steps)) or len(self.values) != len(self.steps):
            raise ValueError("steps must rise, and values must be as many")
        return self


def read_expected_curve(path: str | PathLike[str]) -> ExpectedCurve:
    """The curve in a file. ConfigError when there is none, or none that a page draws."""
    try:
        curve = ExpectedCurve.model_validate_json(read_regular_file(Path(path)))
    except OSError as error:
        raise ConfigError(
            f"run.expected_curve = '{path}': cannot be read ({error.strerror}); name a JSON file, or null"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"run.expected_curve = '{path}': {where}: {first['msg']}") from None
    if not places_of(curve.metric):
        raise ConfigError(
            f"run.expected_curve = '{path}': metric '{printable(curve.metric, lines=False)}' is none that report.html "
            "draws; name one of its curves, such as reward or eval/<set>/accuracy"
        )
    return curve
