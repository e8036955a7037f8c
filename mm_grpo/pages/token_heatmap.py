"""The tokens of a completion with their sight (docs/evaluation.md), as page.js shades them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHADED_FROM = 0.1
"""Nats, above and below 0, from which page.js shades a token (SHADES there)."""

Tokens = Sequence[tuple[str, float]]
Heatmap = list[str | tuple[str, float]]
"""Pieces of a text: those that are shaded with their nats, and what lies between them."""


def tokens_of(row: Mapping[str, Any]) -> Tokens:
    """Each token's text and nats; empty where a row's sight was not measured."""
    sight = row.get("sight")
    return list(zip(sight["pieces"], sight["tokens"], strict=True)) if sight else []


def total_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sight of a completion: its nats, and the uid of the row that lent its images."""
    sight = row.get("sight")
    return sight and {name: sight[name] for name in ("nats", "other")}


def heatmap(tokens: Tokens, whole: str, start: int, end: int) -> Heatmap | None:
    """`whole[start:end]` in pieces; None where `tokens` are not those of `whole`, or none of them is shaded.

    >>> heatmap([("It", 0.0), (" is", 0.01), (" red", 4.5)], "It is red", 1, 9)
    ['t is', (' red', 4.5)]
    """
    if "".join(piece for piece, _ in tokens) != whole:
        return None
    found: Heatmap = []
    place = 0
    for piece, nats in tokens:
        text = piece[max(0, start - place) : max(0, end - place)]
        place += len(piece)
        if not text:
            continue
        if abs(nats) >= SHADED_FROM:
            found.append((text, round(nats, 4)))
        elif found and isinstance(found[-1], str):
            found[-1] += text
        else:
            found.append(text)
    return found if any(isinstance(piece, tuple) for piece in found) else None
