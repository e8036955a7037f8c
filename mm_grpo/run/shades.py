"""The tokens of a completion with their sight (docs/evaluation.md), as report.html shades them.

A row's `sight` is what a run wrote: anything that does not fit the completion's text is left out, and then the text is
shown without shades. Each level has a class in report.css; LEGEND says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mm_grpo.terminal import printable

LEVELS = (0.1, 0.5, 1.0, 3.0)
"""Nats from which a token has the shade 1, 2, 3 and 4: the image makes it 1.1, 1.6, 2.7 and 20 times as likely."""
AGAINST = (0.1, 1.0)
"""The same below 0, where the images of the other row make it likelier: -1 and -2."""
LEGEND = (
    (0, f"within {LEVELS[0]:g} nats of 0"),
    *((i + 1, f"from {low:g} nats, {math.exp(low):.2g} times as likely") for i, low in enumerate(LEVELS)),
    (-1, f"below -{AGAINST[0]:g} nats: likelier with the other image"),
)

Shaded = list[tuple[str, float, int]]
"""Pieces of a text with their nats and their level; of neighbours without a shade one piece, with the sum."""


def level_of(nats: float) -> int:
    """The shade of a token.

    >>> [level_of(nats) for nats in (-4, -0.2, 0.0999, 0.1, 2.9, 3)]
    [-2, -1, 0, 1, 3, 4]
    """
    if nats < 0:
        return -sum(-nats >= low for low in AGAINST)
    return sum(nats >= low for low in LEVELS)


def tokens_of(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Each token's text and nats; empty where a row's `sight` is none."""
    sight = row.get("sight")
    if not isinstance(sight, Mapping):
        return []
    nats, pieces = sight.get("tokens"), sight.get("pieces")
    if not isinstance(nats, list) or not isinstance(pieces, list) or len(nats) != len(pieces):
        return []
    if not all(isinstance(piece, str) for piece in pieces) or not all(map(_is_number, nats)):
        return []
    return list(zip(pieces, nats, strict=True))


def total_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sight of a completion: its nats, and the uid of the row that lent its images."""
    sight = row.get("sight")
    if not isinstance(sight, Mapping) or not _is_number(sight.get("nats")):
        return None
    return {"nats": sight["nats"], "other": printable(sight.get("other", ""), lines=False)}


def shaded(tokens: Sequence[tuple[str, float]], whole: str, start: int, shown: str) -> Shaded | None:
    """The tokens of a text as they are shown; None where they are not its tokens.

    `whole` is what the tokens joined must be, `start` where in it the part begins that is shown, and `shown` that part
    as the page has it: printable, and with a few words at its end where it was cut. The pieces joined are `shown`.
    """
    if not tokens or "".join(piece for piece, _ in tokens) != whole:
        return None
    found: Shaded = []
    place, at = 0, 0
    for piece, nats in tokens:
        text = printable(piece[max(0, start - place) :])
        place += len(piece)
        if not text:
            continue
        if text.startswith(shown[at:]):  # a token that goes on behind the part
            text = shown[at:]
        if not text or not shown.startswith(text, at):  # the end, or where the text was cut
            break
        at += len(text)
        level = level_of(nats)
        if found and level == found[-1][2] == 0:
            text, nats = found[-1][0] + text, found[-1][1] + nats
            found.pop()
        found.append((text, round(nats, 4), level))
    if at < len(shown):
        found.append((shown[at:], 0.0, 0))
    return found if any(level for _, _, level in found) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
