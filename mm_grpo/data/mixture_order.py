"""The order of a mixture: which row of which source fills which slot, a pure function of seed, step and weights.

Prompts are dealt to the sources in turn and not by lot: after any number of prompts each source is less than one prompt
off its exact share (`Turns`). Drawing a source for each prompt by lot would be off by the root of that number. Each
source goes through its own rows by a `PromptOrder`; an epoch of it may end inside a step, as that of an unmixed run
may. Within a step the slots are in a seeded random order, for processes take every n-th slot and should get of every
source.

A row that replaces another (dynamic sampling) is of the same source, so shares hold there too.
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
    """Maps each slot of each step to a row, where rows are those of several sources, one source after the other.

    Args:
        sizes: rows of each source.
        weights: of each source, above 0; its share of the prompts is its weight over the sum of all.
        names: what the metric `epoch/{name}` calls each source.
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
        """The row of each of the P slots of a step, numbered through all sources; steps count from 1."""
        return [
            self._starts[source] + self._orders[source].rows(draw + 1)[0]
            for source, draw in self._places(step)
        ]

    def spare(self, step: int, attempt: int, slot: int, attempts: int) -> int:
        """The row, of the same source, that replaces that of a slot at a later attempt (from 1) of `attempts`."""
        source, draw = self._places(step)[slot]
        return self._starts[source] + self._orders[source].spare(draw + 1, attempt, 0, attempts)

    def epochs(self, step: int) -> dict[str, float]:
        """`epoch/{source}`, how often a source has been gone through, and `epoch`, 1 after every row of all."""
        prompts = step * self.prompts_per_step
        drawn = zip(self.names, self._turns.counts(prompts), self.sizes, strict=True)
        return {
            "epoch": prompts / float(self._longest),
            **{f"epoch/{name}": count / size for name, count, size in drawn},
        }

    @property
    def steps_per_epoch(self) -> int:
        """The steps in which every row of every source comes at least once."""
        return math.ceil(self._longest / self.prompts_per_step)

    @property
    def _longest(self) -> Fraction:
        """The prompts after which every row of every source has come: those of the source that needs the most."""
        total = sum(self.weights)
        return max(Fraction(n * total, w) for n, w in zip(self.sizes, self.weights, strict=True))

    def sentence(self, steps: int) -> str:
        """The shares and sizes, and what an epoch is."""
        shares = ", ".join(
            f"{name} {weight / sum(self.weights):.1%} ({size:,} rows)"
            for name, weight, size in zip(self.names, self.weights, self.sizes, strict=True)
        )
        return f"{super().sentence(steps)}; mixture: {shares}"

    def _places(self, step: int) -> list[tuple[int, int]]:
        """Of each slot of a step the source, and the number of the draw from it, from 0."""
        places = [self._turns.place(position) for position in self._positions(step)]
        if not self.shuffle:
            return places
        return [places[at] for at in permutation(len(places), f"mixture slots/{self.seed}/{step}")]


class Turns:
    """Which prompt is for which source, where the i-th of n sources has the weight w_i, and all have W.

    Among the sources that lag behind their share by at least 1/(2n - 2) of a prompt, the next prompt goes to the one
    that would first be too late. So no source is ever further than 1 - 1/(2n - 2) prompts off, which is the best there
    is (R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980). After W prompts all are exact and
    it begins again; turns are made as far as they are asked for.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights, self.total = list(weights), sum(weights)
        self._sources = array("I")
        self._prompts = [array("Q") for _ in weights]
        """The prompts of each source."""
        self._scale = max(1, 2 * len(weights) - 2)

    def place(self, position: int) -> tuple[int, int]:
        """The source of a prompt (from 0), and how many prompts that source had before."""
        periods, rest = divmod(position, self.total)
        while len(self._sources) <= rest:
            self._deal()
        source = self._sources[rest]
        return source, periods * self.weights[source] + bisect_left(self._prompts[source], rest)

    def counts(self, asked: int) -> list[int]:
        """How many of the first `asked` prompts each source has."""
        periods, rest = divmod(asked, self.total)
        self.place(rest)
        return [
            periods * w + bisect_left(own, rest) for w, own in zip(self.weights, self._prompts, strict=True)
        ]

    def _deal(self) -> None:
        late = (self._scale - 1) * self.total
        due = []  # of the sources that lag, how soon each is late
        for source, (weight, own) in enumerate(zip(self.weights, self._prompts, strict=True)):
            # prompts, times W and the scale
            lag = self._scale * (weight * (len(self._sources) + 1) - self.total * len(own))
            if lag >= self.total:
                due.append(((late - lag) / weight, source))
        _, source = min(due)
        self._prompts[source].append(len(self._sources))
        self._sources.append(source)


def ratio(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers of the same ratio; decimals are taken as they are written.

    >>> ratio([0.5, 1.5, 1])
    [1, 3, 2]
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    return [each // math.gcd(*whole) for each in whole]
