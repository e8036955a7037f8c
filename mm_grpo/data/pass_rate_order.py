"""The order of rows by their pass rates (`data.pass_rate`): rows near one half, with the most mixed groups, come most.

A row's pass rate is a running estimate: the share of successes of each of its groups enters it with the factor f,
rate + f · (share - rate). The first pass has every row once. Before each later pass its n places are dealt to the rows
in proportion to MIN_WEIGHT + (1 - MIN_WEIGHT) · 4 · rate · (1 - rate), each within one place of its share (systematic
sampling), and put in a random order. A row without an estimate counts as one half. No row is left out for good: a row
that was not solved may be solved later.

The order must be known before the rewards: prompts are made a step ahead, and with `rollout.max_staleness` k steps are
sampled k + 1 ahead. So the pass that begins in step s is drawn from the groups of steps up to s - 2 - k, even if more
is known. A resumed run draws the same: a checkpoint has the estimates, and the passes that are drawn and not over.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from mm_grpo.data.order import PromptOrder, permutation

MIN_WEIGHT = 0.1
"""Weight of a row that is always or never solved, not 0: its estimate is of an older model. At one half it is 1."""
KEY = "pass_rates"


class PassRateOrder(PromptOrder):
    """Order that maps each slot of each step to a row. Every process has one, and shows it the same shares.

    Args:
        n_rows, prompts_per_step, seed: as of `PromptOrder`.
        factor: f, weight of the newest group in an estimate, above 0 and at most 1.
        staleness: k, steps that are sampled ahead of the learner.
    """

    uses_shares = True

    def __init__(
        self, n_rows: int, prompts_per_step: int, seed: int, factor: float, staleness: int = 0
    ) -> None:
        super().__init__(n_rows, prompts_per_step, seed)
        self.factor, self.lag = factor, 2 + staleness
        self.rates: list[float | None] = [None] * n_rows
        self._drawn: dict[int, list[int]] = {}
        """The rows of passes that are drawn and not over."""

    def rows(self, step: int) -> list[int]:
        """Return the row of each of the P slots of a step. ValueError if its pass is not drawn yet."""
        rows = []
        for position in self._positions(step):
            epoch, place = divmod(position, self.n_rows)
            if epoch not in self._drawn and self.first_step(epoch) > self.lag:
                raise ValueError(f"step {step} is of pass {epoch}, which is not drawn")
            permuted = self._drawn.get(epoch)
            rows.append(self._row(position, self.seed, True) if permuted is None else permuted[place])
        return rows

    def first_step(self, epoch: int) -> int:
        """Return the step in which a pass begins. Up to step `lag` a pass has no estimates, and every row once."""
        return epoch * self.n_rows // self.prompts_per_step + 1

    def draws_in(self, steps: int) -> bool:
        """Return True if a run of so many steps has a pass that is drawn by estimates."""
        return self.first_step((steps * self.prompts_per_step - 1) // self.n_rows) > self.lag

    def observe(self, step: int, shares: Iterable[tuple[int, float]]) -> None:
        """Add rows of a learned step, with their shares of successes, to the estimates; draw the pass that is due."""
        for row, share in shares:
            rate = self.rates[row]
            self.rates[row] = share if rate is None else rate + self.factor * (share - rate)
        n, prompts, due = self.n_rows, self.prompts_per_step, step + self.lag
        for epoch in range(-(-(due - 1) * prompts // n), -(-due * prompts // n)):
            self._drawn[epoch] = self._draw(epoch)
        for epoch in [epoch for epoch in self._drawn if epoch < step * prompts // n]:
            del self._drawn[epoch]

    def state(self) -> dict[str, str]:
        """Return rates and drawn passes as one compressed text."""
        text = json.dumps({"rates": self.rates, "drawn": sorted(self._drawn.items())})
        return {KEY: base64.b85encode(zlib.compress(text.encode(), 1)).decode()}

    def restore(self, extra: Mapping[str, Any]) -> None:
        if KEY in extra:
            state = json.loads(zlib.decompress(base64.b85decode(extra[KEY])))
            self.rates, self._drawn = state["rates"], dict(state["drawn"])

    def sentence(self, steps: int) -> str:
        return f"{super().sentence(steps)}; from the second pass on rows near a pass rate of one half come more often"

    def _draw(self, epoch: int) -> list[int]:
        n, key = self.n_rows, f"pass rate/{self.seed}/{epoch}"
        rows = permutation(n, key)
        ends = list(accumulate(weight(self.rates[row]) for row in rows))
        start, places = random.Random(f"{key}/start").random(), list[int]()
        for row, end in zip(rows, ends, strict=True):
            while len(places) < n and (start + len(places)) * ends[-1] / n < end:
                places.append(row)
        places += rows[-1:] * (n - len(places))  # the last place may round up to the end
        return [places[at] for at in permutation(n, f"{key}/order")]


def weight(rate: float | None) -> float:
    """Return the weight of a row of this pass rate, 1 at one half.

    >>> weight(0.5), weight(0.0), weight(None)
    (1.0, 0.1, 1.0)
    """
    return 1.0 if rate is None else MIN_WEIGHT + (1 - MIN_WEIGHT) * 4 * rate * (1 - rate)
