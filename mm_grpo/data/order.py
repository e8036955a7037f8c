"""The order in which rows are used: a pure function of the seed and the epoch.

Every epoch is one permutation of all rows, and steps take P slots each from the epochs laid end to
end. So every row comes once an epoch, an epoch's end may fall inside a step, and with P above the
number of rows a row fills two slots of one step. Nothing is remembered between calls: a resumed run
asks for step n and gets what the first run got, on any number of processes. A subclass that does remember
(`observe`) returns it in `state`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any


class PromptOrder:
    """Order that maps each slot of each step to a row.

    Args:
        n_rows: rows in the dataset.
        prompts_per_step: P, slots in a step.
        seed: the run's seed, or a text.
        shuffle: False takes the rows in their own order, in every epoch.
        key: seeds the permutations, together with `seed`.
    """

    uses_shares = False
    """True if the order depends on which rows were solved, so that `observe` has to be called after each step."""

    def __init__(
        self,
        n_rows: int,
        prompts_per_step: int,
        seed: int | str,
        shuffle: bool = True,
        key: str = "prompt order",
    ) -> None:
        self.n_rows, self.prompts_per_step = n_rows, prompts_per_step
        self.seed, self.shuffle, self.key = seed, shuffle, key
        # a step touches two epochs and two of the spares, unless P exceeds the rows
        self._permutation = lru_cache(maxsize=4)(partial(permutation, n_rows))

    def rows(self, step: int) -> list[int]:
        """Return the row of each of the P slots of a step; steps count from 1.

        >>> PromptOrder(3, 2, seed=0, shuffle=False).rows(2)
        [2, 0]
        """
        return [self._row(position, self.seed, self.shuffle) for position in self._positions(step)]

    def spare(self, step: int, attempt: int, slot: int, attempts: int) -> int:
        """Return the row that replaces a slot's row at a later attempt (from 1) of `attempts`.

        Replacements have a separate order, always shuffled, in which each row comes once before any comes again.
        """
        position = ((step - 1) * (attempts - 1) + attempt - 1) * self.prompts_per_step + slot
        return self._row(position, f"{self.seed}/spare", True)

    def drawn(self, step: int) -> set[int]:
        """Return the rows of the slots of steps 1 to `step`, without replacements."""
        if step >= self.steps_per_epoch:
            return set(range(self.n_rows))
        return {row for earlier in range(1, step + 1) for row in self.rows(earlier)}

    def observe(self, step: int, shares: Iterable[tuple[int, float]]) -> None:
        """Learn each sampled row's share of successes in a finished step; the same on every process."""

    def state(self) -> dict[str, str]:
        """Return what a checkpoint has to keep of the order."""
        return {}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint's extra; {} at the start of a run."""

    def epochs(self, step: int) -> dict[str, float]:
        """Return the metric `epoch` after `step`, 1 after every row once; a mixture adds `epoch/{source}` for each."""
        return {"epoch": step * self.prompts_per_step / self.n_rows}

    def sentence(self, steps: int) -> str:
        """Describe the rows and how often each comes in so many steps; of a mixture its shares too."""
        times = self.prompts_per_step / self.n_rows
        repeats = f"; each comes {times:.3g} times in a step (rollout.prompts_per_step)" if times > 1 else ""
        return f"data: {self.n_rows:,} rows, {self.epochs(steps)['epoch']:.3g} epochs in {steps:,} steps{repeats}"

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every row comes at least once: n_rows / P, rounded up."""
        return -(-self.n_rows // self.prompts_per_step)

    def _positions(self, step: int) -> range:
        """Positions of a step's slots in the epochs laid end to end."""
        return range((step - 1) * self.prompts_per_step, step * self.prompts_per_step)

    def _row(self, position: int, seed: int | str, shuffle: bool) -> int:
        epoch, place = divmod(position, self.n_rows)
        return self._permutation(f"{self.key}/{seed}/{epoch}")[place] if shuffle else place


def permutation(size: int, key: str) -> list[int]:
    """Return the numbers below `size` in the random order that the text `key` decides."""
    order = list(range(size))
    # Python seeds a string through SHA-512: the same on every machine, whatever PYTHONHASHSEED is
    random.Random(key).shuffle(order)
    return order
