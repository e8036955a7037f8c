"""Sight that is lost: rewards rise while completions come to depend on their images hardly at all.

A model may earn rewards without looking: the text of the rows gives the answer away, most answers are one word, or
images and rows were mixed up, so that only the text is left to learn from. The reward curve looks as it does in a run
that learns to see. Sight (`sight/nats`, learner/sight.py) tells the two apart: how much likelier a completion is with
its own image than with that of another row, which is 0 on average where the image plays no part.

The means of the last measurements are compared with those of the first, each with its standard error: what may be noise
is no loss. Rewards that have not risen are no shortcut, whatever sight does, and a run whose rows are text is never
measured.
"""

from __future__ import annotations

import math

from mm_grpo.health import Alarm
from mm_grpo.health.history import History

WINDOW = 3
"""Measurements whose mean is taken, at the start of the run and now."""
RISE = 0.25
"""Part of the range of rewards seen by which the reward has risen. A rise of a tenth takes so little sight that a run
which learns to see is not told from one that does not. Where a step has few completions it is more: three standard
errors of the difference of two means, of rewards that lie at both ends of the range, which vary most."""
NEAR_ZERO = 0.1
"""Nats per completion below which it hardly depends on its image: another makes it 0.9 times as likely, or more."""
FALLEN = 0.2
"""Part of the highest mean of the run, per completion and per token, at which sight has fallen towards 0. Both, for
completions that become short have less per completion, and those that become long less per token."""
ERRORS = 2
"""Standard errors of nats per completion by which sight, at the most, lies below either bound."""


class SightLost:
    """The guard `sight_lost`. Reads `sight/nats`, its `sight/nats_stderr`, `sight/nats_per_token` and `sight/reward`
    where a step has them; without a standard error, that of a log from before there was one, it is 0.

    `completions` is P·G.
    """

    name = "sight_lost"

    def __init__(self, completions: int) -> None:
        self.rise = max(RISE, 3 * 0.5 * math.sqrt(2 / (WINDOW * completions)))
        self._seen: list[tuple[float, float, float, float]] = []
        """Of each measurement the reward, nats per completion and per token, and the variance of the nats."""
        self._best = (0.0, 0.0, 0.0)
        """The highest nats per completion of a window, those that are no noise, and the highest nats per token."""

    def observe(self, run: History) -> Alarm | None:
        """Take in the newest step of `run`."""
        values = [run.now.get(f"sight/{name}") for name in ("reward", "nats", "nats_per_token")]
        if any(value is None for value in values):
            return None
        reward, nats, per_token = map(float, values)  # type: ignore[arg-type]
        variance = float(run.now.get("sight/nats_stderr") or 0.0) ** 2
        self._seen.append((reward, nats, per_token, variance))
        if len(self._seen) < WINDOW:
            return None
        before, first, _, _ = self._means(self._seen[:WINDOW])
        now, nats, per_token, error = self._means(self._seen[-WINDOW:])
        best = self._best
        self._best = tuple(map(max, best, (nats, nats - ERRORS * error, per_token)))  # type: ignore[assignment]
        if len(self._seen) < 2 * WINDOW or run.low is None or run.high is None:
            return None
        if now - before < self.rise * (run.high - run.low) or now == before:
            return None
        highest, surely, highest_per_token = best
        most = nats + ERRORS * error
        fallen = most <= FALLEN * surely and per_token <= FALLEN * highest_per_token
        if most >= NEAR_ZERO and not fallen:
            return None
        return Alarm(
            f"the mean reward of rows with images has risen from {before:.4g} to {now:.4g}, while completions depend "
            f"on their images by {nats:.3g} nats (at the start {first:.3g}, at most {highest:.3g}), so the "
            "rewards are earned without looking. Likely the text gives the answer away, most answers are the same, or "
            "images stand at the wrong rows: compare them in rollouts/, evaluate with shuffled images, or set "
            "algorithm.perception_coef; for a task of text set run.guards.sight_lost=off"
        )

    @staticmethod
    def _means(measured: list[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
        """Mean reward, nats per completion and nats per token, and the standard error of the second."""
        *means, variance = (sum(values) / len(values) for values in zip(*measured, strict=True))
        return means[0], means[1], means[2], math.sqrt(variance / len(measured))
