"""Sight that is lost: rewards rise while completions come to depend on their images hardly at all.

A model may earn rewards without looking: the text of the rows gives the answer away, most answers are one word, or
images and rows were mixed up, so that only the text is left to learn from. The reward curve looks as it does in a run
that learns to see. Sight (`sight/nats`, learner/sight.py) tells the two apart: how much likelier a completion is with
its own image than with that of another row, which is 0 on average where the image plays no part.

The means of the last measurements are compared with those of the first. Rewards that have not risen are no shortcut,
whatever sight does, and a run whose rows are text is never measured.
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


class SightLost:
    """The guard `sight_lost`. Reads `sight/nats`, `sight/nats_per_token` and `sight/reward` where a step has them.

    `completions` is P·G.
    """

    name = "sight_lost"

    def __init__(self, completions: int) -> None:
        self.rise = max(RISE, 3 * 0.5 * math.sqrt(2 / (WINDOW * completions)))
        self._seen: list[tuple[float, float, float]] = []
        """Of each measurement the reward, nats per completion and nats per token."""
        self._best = (0.0, 0.0)

    def observe(self, run: History) -> Alarm | None:
        """Take in the newest step of `run`."""
        values = [run.now.get(f"sight/{name}") for name in ("reward", "nats", "nats_per_token")]
        if any(value is None for value in values):
            return None
        reward, nats, per_token = map(float, values)  # type: ignore[arg-type]
        self._seen.append((reward, nats, per_token))
        if len(self._seen) < WINDOW:
            return None
        before, *first = self._mean(self._seen[:WINDOW])
        now, *last = self._mean(self._seen[-WINDOW:])
        best, self._best = self._best, (max(self._best[0], last[0]), max(self._best[1], last[1]))
        if len(self._seen) < 2 * WINDOW or run.low is None or run.high is None:
            return None
        if now - before < self.rise * (run.high - run.low) or now == before:
            return None
        fallen = all(value <= FALLEN * highest for value, highest in zip(last, best, strict=True))
        if last[0] >= NEAR_ZERO and not fallen:
            return None
        return Alarm(
            f"the mean reward of rows with images has risen from {before:.4g} to {now:.4g}, while completions depend "
            f"on their images by {last[0]:.3g} nats (at the start {first[0]:.3g}, at most {best[0]:.3g}), so the "
            "rewards are earned without looking. Likely the text gives the answer away, most answers are the same, or "
            "images stand at the wrong rows: compare them in rollouts/, evaluate with shuffled images, or set "
            "algorithm.perception_coef; for a task of text set run.guards.sight_lost=off"
        )

    @staticmethod
    def _mean(measured: list[tuple[float, float, float]]) -> list[float]:
        return [sum(values) / len(values) for values in zip(*measured, strict=True)]
