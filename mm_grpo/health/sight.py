"""The guard `sight_lost`: rewards rise while completions come to depend hardly at all on their images.

A model may earn rewards without looking: the text of the rows gives the answer away, most answers are one word, or
images and rows were mixed up, so that only the text is left to learn from. The reward curve looks as it does in a run
that learns to see. Sight (`sight/nats`, learner/sight.py) tells the two apart: how much likelier a completion is with
its own image than with the image of another row. It is 0 on average if the image plays no part.

The means of the last measurements are compared with the means of the first, each with its standard error, so noise is
no loss. If rewards have not risen there is no shortcut, whatever sight does.
"""

from __future__ import annotations

import math

from mm_grpo.health import Alarm
from mm_grpo.health.history import MetricsHistory

WINDOW = 3
"""Measurements whose mean is taken, at the start of the run and now."""
MIN_RISE = 0.25
"""Least rise of the reward, as a part of the range of rewards in the run. A rise of a tenth takes so little sight that
a run which learns to see looks like one that does not. With few completions a step it is more: three standard errors of
the difference of two means, of rewards at both ends of the range, which vary most."""
NEAR_ZERO = 0.1
"""Nats per completion below which it hardly depends on its image: another makes it 0.9 times as likely, or more."""
FALLEN_SHARE = 0.2
"""Share of the highest mean of the run at which sight has fallen towards 0, per completion and per token: completions
that become short have less per completion, and ones that become long less per token."""
STANDARD_ERRORS = 2
"""Standard errors that sight may lie above its mean and still be below either bound."""


class SightLost:
    """Guard over `sight/nats`, `sight/nats_stderr`, `sight/nats_per_token` and `sight/reward` of the measured steps.

    `completions` is P·G.
    """

    name = "sight_lost"

    def __init__(self, completions: int) -> None:
        self.rise = max(MIN_RISE, 3 * 0.5 * math.sqrt(2 / (WINDOW * completions)))
        self._measurements: list[tuple[float, float, float, float]] = []
        """Reward, nats per completion, nats per token, and variance of the nats of each."""
        self._best = (0.0, 0.0, 0.0)
        """Highest of any window: nats per completion, the same less its noise, and nats per token."""

    def observe(self, run: MetricsHistory) -> Alarm | None:
        """Add the newest step of `run`, and return an alarm if sight is lost."""
        values = [run.now.get(f"sight/{name}") for name in ("reward", "nats", "nats_per_token")]
        if any(value is None for value in values):
            return None
        reward, nats, per_token = map(float, values)  # type: ignore[arg-type]
        # a single group has no standard error, nor have old logs: then it is 0
        variance = float(run.now.get("sight/nats_stderr") or 0.0) ** 2
        self._measurements.append((reward, nats, per_token, variance))
        if len(self._measurements) < WINDOW:
            return None
        before, first, _, _ = self._means(self._measurements[:WINDOW])
        now, nats, per_token, error = self._means(self._measurements[-WINDOW:])
        margin = STANDARD_ERRORS * error
        best = self._best
        self._best = tuple(map(max, best, (nats, nats - margin, per_token)))  # type: ignore[assignment]
        if len(self._measurements) < 2 * WINDOW or run.low is None or run.high is None:
            return None
        if now - before < self.rise * (run.high - run.low) or now == before:
            return None
        highest, certain, highest_per_token = best
        upper = nats + margin
        fallen = upper <= FALLEN_SHARE * certain and per_token <= FALLEN_SHARE * highest_per_token
        if upper >= NEAR_ZERO and not fallen:
            return None
        return Alarm(
            f"the mean reward of rows with images or videos has risen from {before:.4g} to {now:.4g}, while "
            f"completions depend on them by {nats:.3g} nats (at the start {first:.3g}, at most {highest:.3g}), so the "
            "rewards are earned without looking. Likely the text gives the answer away, most answers are the same, or "
            "they stand at the wrong rows: compare them in rollouts/, evaluate with run.eval_blind=shuffled, or set "
            "algorithm.perception_coef; for a task of text set run.guards.sight_lost=off"
        )

    @staticmethod
    def _means(measurements: list[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
        """Return the mean reward, nats per completion, nats per token, and the standard error of the second."""
        *means, variance = (sum(values) / len(values) for values in zip(*measurements, strict=True))
        return means[0], means[1], means[2], math.sqrt(variance / len(measurements))
