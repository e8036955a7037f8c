"""The order of a mixture: which row of which source fills which slot, a pure function of seed, step and weights.

Prompts are dealt to the sources by rounding, not by lot. The sources stand in a binary tree; a node that has been
asked q times has sent round(q * share) prompts to its left side and the others to its right side. After any number of
prompts each source is less than 2 off its exact share, and after as many as the weights add up to (as integers without
a common factor) it is exact. Drawing a source for each prompt by lot would be off by sqrt(q).

Each source goes through its own rows: one permutation after the other, each of all its rows. Where the end of one and
the beginning of the next fall into one step, rows of the next that the step has already are exchanged for later ones,
so no row fills two slots of a step unless the step takes more prompts of the source than it has rows. Within a step the
slots are in a seeded random order, for processes take every n-th slot and should get of every source.

A row that replaces another (dynamic sampling) is of the same source, so shares hold there too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
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
        if min(sizes) < 1 or not len(sizes) == len(weights) == len(names):
            raise ValueError(
                f"sizes={list(sizes)}, weights={list(weights)} and names={list(names)} do not agree"
            )
        self.sizes, self.names, self.weights = list(sizes), list(names), ratio(weights)
        self._starts = [0, *accumulate(sizes)]
        self._root = _tree(range(len(sizes)), self.weights)
        self._dealt = lru_cache(maxsize=256)(self._counts_after)
        self._sources = [
            _SourceOrder(size, f"{seed}/{number}", self._dealt_to(number), shuffle)
            for number, size in enumerate(self.sizes)
        ]

    def rows(self, step: int) -> list[int]:
        """The row of each of the P slots of a step, numbered through all sources; steps count from 1."""
        return [self._starts[source] + self._sources[source].row(draw) for source, draw in self._places(step)]

    def spare(self, step: int, attempt: int, slot: int, attempts: int) -> int:
        """The row, of the same source, that replaces that of a slot at a later attempt (from 1) of `attempts`."""
        self.check_spare(step, attempt, slot, attempts)
        source, draw = self._places(step)[slot]
        return self._starts[source] + self._sources[source].spare(draw * (attempts - 1) + attempt - 1)

    def epoch(self, step: int) -> float:
        """Epochs used once `step` is done. One ends when every row of every source has come at least
        once: with the source that needs the most prompts for that."""
        return step * self.prompts_per_step / float(self._prompts_per_epoch)

    def epochs(self, step: int) -> dict[str, float]:
        """`epoch`, and `epoch/{source}`: how often a source has been gone through."""
        drawn = zip(self.names, self._dealt(step), self.sizes, strict=True)
        return {"epoch": self.epoch(step), **{f"epoch/{name}": count / size for name, count, size in drawn}}

    @property
    def steps_per_epoch(self) -> int:
        """The steps in which every row of every source comes at least once."""
        return bisect_left(
            range(2**62),
            True,
            key=lambda step: all(c >= size for c, size in zip(self._dealt(step), self.sizes, strict=True)),
        )

    @property
    def _prompts_per_epoch(self) -> Fraction:
        total = sum(self.weights)
        return max(
            Fraction(size * total, weight) for size, weight in zip(self.sizes, self.weights, strict=True)
        )

    @property
    def sentence(self) -> str:
        """The shares and sizes, and what an epoch is."""
        total = sum(self.weights)
        shares = ", ".join(
            f"{name} {weight / total:.1%} ({size:,} rows)"
            for name, weight, size in zip(self.names, self.weights, self.sizes, strict=True)
        )
        return f"mixture: {shares}; an epoch, in which every row comes at least once, is {self.steps_per_epoch:,} steps"

    def _places(self, step: int) -> list[tuple[int, int]]:
        """Of each slot of a step the source, and the number of the draw from it, from 0."""
        if step < 1:
            raise ValueError(f"step={step}; steps count from 1")
        size = self.prompts_per_step
        places = [_place(self._root, position) for position in range((step - 1) * size, step * size)]
        if not self.shuffle:
            return places
        return [places[at] for at in permutation(size, f"mixture slots/{self.seed}/{step}")]

    def _dealt_to(self, source: int) -> Callable[[int], int]:
        return lambda step: self._dealt(step)[source]

    def _counts_after(self, step: int) -> tuple[int, ...]:
        """The draws from each source in the steps up to this one."""
        counts = [0] * len(self.sizes)
        _count(self._root, step * self.prompts_per_step, counts)
        return tuple(counts)


def ratio(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers of the same ratio; decimals are taken as they are written.

    >>> ratio([0.5, 1.5, 1])
    [1, 3, 2]
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    return [each // math.gcd(*whole) for each in whole]


# how prompts are dealt to sources --------------------------------------------------------------


class _Node:
    """Two sides and the weight of the left one among that of both. A side is a node, or the number of a source."""

    def __init__(self, left: _Node | int, right: _Node | int, share: int, total: int) -> None:
        self.left, self.right, self.share, self.total = left, right, share, total

    def sent_left(self, asked: int) -> int:
        """Count the prompts of the left side among so many: their share, rounded, halves up."""
        return (2 * asked * self.share + self.total) // (2 * self.total)


def _tree(sources: Sequence[int], weights: Sequence[int]) -> _Node | int:
    """The sources on two sides of weights as equal as dealing them out by weight makes them, and so on."""
    if len(sources) == 1:
        return sources[0]
    sides: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for source in sorted(sources, key=lambda each: -weights[each]):
        lighter = int(sums[1] < sums[0])
        sides[lighter].append(source)
        sums[lighter] += weights[source]
    return _Node(_tree(sides[0], weights), _tree(sides[1], weights), sums[0], sum(sums))


def _place(node: _Node | int, position: int) -> tuple[int, int]:
    """The source of a prompt, and how many prompts that source had before."""
    while isinstance(node, _Node):
        before = node.sent_left(position)
        if node.sent_left(position + 1) > before:
            node, position = node.left, before
        else:
            node, position = node.right, position - before
    return node, position


def _count(node: _Node | int, asked: int, counts: list[int]) -> None:
    """Put how many of `asked` prompts each source got into `counts`."""
    if not isinstance(node, _Node):
        counts[node] = asked
        return
    left = node.sent_left(asked)
    _count(node.left, left, counts)
    _count(node.right, asked - left, counts)


# the rows of one source ------------------------------------------------------------------------


class _SourceOrder:
    """The rows of one source by the number of the draw. `drawn(step)` says how many draws end with a step."""

    def __init__(self, size: int, key: str, drawn: Callable[[int], int], shuffle: bool) -> None:
        self.size, self.shuffle, self._drawn = size, shuffle, drawn
        self._plain = lru_cache(maxsize=3)(lambda epoch: permutation(size, f"mixture/{key}/{epoch}"))
        self._spares = lru_cache(maxsize=2)(lambda epoch: permutation(size, f"mixture/{key}/spare/{epoch}"))
        self._orders: dict[int, list[int]] = {}

    def row(self, draw: int) -> int:
        epoch, place = divmod(draw, self.size)
        return self._order(epoch)[place] if self.shuffle else place

    def spare(self, draw: int) -> int:
        """Replacements have an order of their own, always shuffled."""
        epoch, place = divmod(draw, self.size)
        return self._spares(epoch)[place]

    def _order(self, epoch: int) -> list[int]:
        """The rows in one epoch: its permutation, but for rows that the step in which it begins has already.

        An exchange of rows may reach the end of an epoch, and so bear upon the next: only where the source is hardly
        larger than what a step takes of it. There the epochs before are made too.
        """
        if epoch not in self._orders:
            first = epoch
            while first > 0 and first - 1 not in self._orders and not self._ends_as_drawn(first - 1):
                first -= 1
            for each in range(first, epoch + 1):
                before = self._orders.get(each - 1) or (self._plain(each - 1) if each else [])
                self._orders[each] = self._without_repeats(each, before)
                for old in [number for number in self._orders if number < each - 1]:
                    del self._orders[old]
        return self._orders[epoch]

    def _without_repeats(self, epoch: int, before: Sequence[int]) -> list[int]:
        """The permutation of an epoch with its first rows, those of a step that the one `before` ends in, exchanged."""
        order = list(self._plain(epoch))
        tail, head = self._shared_step(epoch)
        taken = set(before[len(before) - tail :]) if tail else set()
        later = (at for at in range(head, self.size) if order[at] not in taken)
        for at in range(head):
            if order[at] in taken:
                other = next(later)
                order[at], order[other] = order[other], order[at]
        return order

    def _ends_as_drawn(self, epoch: int) -> bool:
        """True when no exchange can reach the last rows of an epoch, which the next epoch is compared with."""
        tail, head = self._shared_step(epoch)
        return self.size >= head + tail + min(head, tail) + self._shared_step(epoch + 1)[0]

    def _shared_step(self, epoch: int) -> tuple[int, int]:
        """In the step in which an epoch begins: the draws before its beginning, and those after; (0, 0) where the step
        begins with it or takes more than all rows."""
        start = epoch * self.size
        if not start:
            return 0, 0
        step = bisect_left(range(2**62), start + 1, key=self._drawn)  # the first that ends behind it
        first, end = self._drawn(step - 1), self._drawn(step)
        return (start - first, end - start) if first < start and end - first <= self.size else (0, 0)
