"""The twin view on images that the policy sees at too few pixels: held-out scores by steps, with and without it.

    python benchmarks/studies/twin_view.py OUT [--seeds 3] [--steps 80] [--coefs 0 0.1 1]

The base is that of the shapes recipe, taught to name colours and shapes at 84 x 84 pixels; the policy sees 28 x 28 of
them (one token), the teacher all; a weight of 0 is plain GRPO. OUT/twin_view.json has the curves. results/sight.md has
what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import curves

from mm_grpo.data.shapes import shapes_rows

SEEN, ALL = 28 * 28, 84 * 84
"""Pixels of an image for the policy and for its teacher."""


def rows(split: Any, size: int, seed: int) -> list[curves.Row]:
    """Questions for the colour or the shape of one object."""
    return list(shapes_rows(split=split, size=size, seed=seed, kinds=["colour", "shape"], max_objects=1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = curves.parser(__doc__ or "", lessons=200, steps=80)
    parser.add_argument("--coefs", nargs="+", default=["0", "0.1", "1"])
    given = parser.parse_args(arguments)
    base = given.out / "base"
    if not base.exists():
        curves.make_base(base, rows("train", curves.BATCH * given.lessons, 9), lambda row: row["answer"])

    def curve(coef: str, seed: int) -> list[dict[str, float]]:
        twin = {"view": "high_resolution", "coef": float(coef), "max_pixels": ALL} if float(coef) else None
        settings = {"data": {"max_pixels": SEEN}, "algorithm": {"twin_view": twin}}
        train, held = rows("train", 4000, 1), {"heldout": rows("heldout", 300, 2)}
        return curves.run(given, f"coef-{coef}", seed, settings, train=train, held=held)

    kept = ("eval/heldout/score", "reward", "twin_view/kl", "twin_view/share")
    curves.compare(given, given.coefs, curve, "twin_view.json", kept)


if __name__ == "__main__":
    main()
