"""The order in which rows are used: a pure function of the seed and the epoch.

Every epoch is one permutation of all rows, and steps take P slots each from the epochs laid end to
end. So every row comes once an epoch, an epoch's end may fall inside a step, and with P above the
number of rows a row fills two slots of one step. Nothing is remembered between calls: a resumed run
asks for step n and gets what the first run got, on any number of processes.
"""

from __future__ import annotations

import random
from functools import lru_cache


class PromptOrder:
    """Maps each slot of each step to a row.

    Args:
        n_rows: rows in the dataset.
        prompts_per_step: P, slots in a step.
        seed: the run's seed.
        shuffle: False takes the rows as they stand, in every epoch.
    """

    def __init__(self, n_rows: int, prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        if n_rows < 1 or prompts_per_step < 1:
            raise ValueError(f"n_rows={n_rows} and prompts_per_step={prompts_per_step} must be at least 1")
        self.n_rows = n_rows
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle

    def rows(self, step: int) -> list[int]:
        """The row of each of the P slots of a step; steps count from 1.

        >>> PromptOrder(3, 2, seed=0, shuffle=False).rows(2)
        [2, 0]
        """
        if step < 1:
            raise ValueError(f"step={step}; steps count from 1")
        first = (step - 1) * self.prompts_per_step
        return [self._row(position) for position in range(first, first + self.prompts_per_step)]

    def spare(self, step: int, attempt: int, slot: int, attempts: int) -> int:
        """The row that replaces that of a slot at a later attempt (from 1) of `attempts`.

        Replacements have an order of their own, always shuffled, in which each row comes once before any
        comes again.
        """
        self.check_spare(step, attempt, slot, attempts)
        position = ((step - 1) * (attempts - 1) + attempt - 1) * self.prompts_per_step + slot
        epoch, place = divmod(position, self.n_rows)
        return epoch_order(self.n_rows, f"{self.seed}/spare", epoch)[place]

    def check_spare(self, step: int, attempt: int, slot: int, attempts: int) -> None:
        """ValueError where `spare` is asked about what no run asks."""
        if not (step >= 1 and 1 <= attempt < attempts and 0 <= slot < self.prompts_per_step):
            raise ValueError(
                f"(step {step}, attempt {attempt} of {attempts}, slot {slot}) is outside the plan"
            )

    def epoch(self, step: int) -> float:
        """Epochs used once `step` is done: 0 for step 0, 1 after every row once."""
        return step * self.prompts_per_step / self.n_rows

    def epochs(self, step: int) -> dict[str, float]:
        """The metric `epoch` once `step` is done; a mixture adds `epoch/{source}` for each of its sources."""
        return {"epoch": self.epoch(step)}

    @property
    def sentence(self) -> str:
        """Describe the order for the start of a run; of a mixture its shares."""
        return ""

    @property
    def steps_per_epoch(self) -> int:
        """The steps in which every row comes at least once: n_rows / P, rounded up."""
        return -(-self.n_rows // self.prompts_per_step)

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self.n_rows)
        return epoch_order(self.n_rows, self.seed, epoch)[place] if self.shuffle else place


@lru_cache(maxsize=8)  # a step touches two epochs of each order, unless P exceeds the rows
def epoch_order(n_rows: int, seed: int | str, epoch: int) -> tuple[int, ...]:
    """The permutation of one epoch (from 0), in Python's own generator: the same on every machine.

    A string seeds it through SHA-512, so neither PYTHONHASHSEED nor the state of another generator counts.
    """
    return tuple(permutation(n_rows, f"prompt order/{seed}/{epoch}"))


def permutation(size: int, key: str) -> list[int]:
    """The numbers below `size` in the random order that a text decides."""
    order = list(range(size))
    random.Random(key).shuffle(order)
    return order
