"""The order of a mixture: which row of which source fills which slot, a pure function of seed, step and weights.

Sources take turns and are not drawn by lot: after any number of prompts each source is less than one prompt off its
exact share (`Turns`). Lots would be off by the root of that number. Each source has a `PromptOrder` of its rows, whose
epoch may end inside a step. Within a step the slots are in a seeded random order, so that processes, which take
every n-th slot, get rows of all sources.

A row that replaces another (dynamic sampling) comes from the same source, so shares hold there too.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from mm_grpo.data.order import PromptOrder, permutation


class MixtureOrder(PromptOrder):
    """Order that maps each slot of each step to a row; rows of all sources are numbered through.

    Args:
        sizes: rows of each source.
        weights: weight of each source, above 0; its share of the prompts is its weight over the sum of all.
        names: name of each source in the metric `epoch/{name}`.
        prompts_per_step, seed, shuffle: as of `PromptOrder`; without shuffling slots are not exchanged either.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        names: Sequence[str],
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        super().__init__(sum(sizes), prompts_per_step, seed, shuffle)
        self.sizes, self.names, self.weights = list(sizes), list(names), ratio(weights)
        self._starts = [0, *accumulate(sizes)]
        self._turns = Turns(self.weights)
        self._orders = [
            PromptOrder(size, 1, f"{seed}/{at}", shuffle, "mixture") for at, size in enumerate(sizes)
        ]

    def rows(self, step: int) -> list[int]:
        """Return the row of each of the P slots of a step; steps count from 1."""
        return [
            self._starts[source] + self._orders[source].rows(draw + 1)[0]
            for source, draw in self._places(step)
        ]

    def spare(self, step: int, attempt: int, slot: int, attempts: int) -> int:
        """Return the row of the same source that replaces a slot's row at a later attempt (from 1) of `attempts`."""
        source, draw = self._places(step)[slot]
        return self._starts[source] + self._orders[source].spare(draw + 1, attempt, 0, attempts)

    def epochs(self, step: int) -> dict[str, float]:
        """Return passes over each source as `epoch/{source}`, and `epoch`, 1 after every row of all sources."""
        prompts = step * self.prompts_per_step
        counts = zip(self.names, self._turns.counts(prompts), self.sizes, strict=True)
        return {
            "epoch": prompts / float(self._longest),
            **{f"epoch/{name}": count / size for name, count, size in counts},
        }

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every row of every source comes at least once."""
        return math.ceil(self._longest / self.prompts_per_step)

    @property
    def _longest(self) -> Fraction:
        """Prompts of an epoch: as many as the slowest source needs for all its rows."""
        total = sum(self.weights)
        return max(Fraction(n * total, w) for n, w in zip(self.sizes, self.weights, strict=True))

    def sentence(self, steps: int) -> str:
        """Describe the rows, and the share and size of each source."""
        shares = ", ".join(
            f"{name} {weight / sum(self.weights):.1%} ({size:,} rows)"
            for name, weight, size in zip(self.names, self.weights, self.sizes, strict=True)
        )
        return f"{super().sentence(steps)}; mixture: {shares}"

    def _places(self, step: int) -> list[tuple[int, int]]:
        """Return for each slot of a step its source, and the number of the draw from that source, from 0."""
        places = [self._turns.place(position) for position in self._positions(step)]
        if not self.shuffle:
            return places
        return [places[at] for at in permutation(len(places), f"mixture slots/{self.seed}/{step}")]


class Turns:
    """Assignment of prompts to n sources, by their weights w_i with the sum W.

    Among the sources that lag behind their share by at least 1/(2n - 2) of a prompt, the next prompt goes to the source
    that would first be too late. So no source is ever further than 1 - 1/(2n - 2) prompts off, the best possible bound
    (R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980). After W prompts all are exact, and
    turns repeat. They are computed as far as they are needed.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights, self.total = list(weights), sum(weights)
        self._sources = array("I")
        """Source of each prompt."""
        self._prompts = [array("Q") for _ in weights]
        """Prompts of each source."""
        self._scale = max(1, 2 * len(weights) - 2)

    def place(self, position: int) -> tuple[int, int]:
        """Return the source of a prompt (from 0), and the number of prompts that the source had before."""
        periods, offset = divmod(position, self.total)
        while len(self._sources) <= offset:
            self._deal()
        source = self._sources[offset]
        return source, periods * self.weights[source] + bisect_left(self._prompts[source], offset)

    def counts(self, n_prompts: int) -> list[int]:
        """Return for each source its number of the first `n_prompts` prompts."""
        periods, offset = divmod(n_prompts, self.total)
        self.place(offset)
        return [
            periods * weight + bisect_left(prompts, offset)
            for weight, prompts in zip(self.weights, self._prompts, strict=True)
        ]

    def _deal(self) -> None:
        late = (self._scale - 1) * self.total
        due = []  # deadlines of the sources that lag
        for source, (weight, prompts) in enumerate(zip(self.weights, self._prompts, strict=True)):
            # in prompts, times W and the scale, so that all numbers are integers
            lag = self._scale * (weight * (len(self._sources) + 1) - self.total * len(prompts))
            if lag >= self.total:
                due.append(((late - lag) / weight, source))
        _, source = min(due)
        self._prompts[source].append(len(self._sources))
        self._sources.append(source)


def ratio(weights: Sequence[float]) -> list[int]:
    """Return weights as the smallest integers of the same ratio; decimals count as they are written.

    >>> ratio([0.5, 1.5, 1])
    [1, 3, 2]
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    return [integer // math.gcd(*integers) for integer in integers]
