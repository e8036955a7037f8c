"""Credit by sight where a text gives the answer away: in most training rows a hint is right, in held-out rows never.

    python benchmarks/studies/shortcut.py OUT [--seeds 3] [--steps 60] [--rules none pgpo vppo]

The base is that of the shapes recipe, taught to answer in three ways: to copy the hint, to look at the image, and to
guess. In training rows copying is right in AGREES of the cases, looking always. Prints what each run scores on held-out
rows whose hint is wrong, by steps; OUT/shortcut.json has it with their sight. results/sight.md has what was seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import curves

from mm_grpo.data.shapes import COLOURS, shapes_rows

COPIES, LOOKS = 0.5, 0.15
"""Shares of the base's answers that copy the hint, and that name what is there; the others are guesses."""
AGREES = 0.9


def rows(split: Any, size: int, agrees: float, seed: int) -> list[curves.Row]:
    """Questions for the colour of one object, with a hint that is right in the share `agrees` of them."""
    rng, found = random.Random(f"shortcut/{split}/{agrees}/{seed}"), []
    for row in shapes_rows(split=split, size=size, seed=seed, kinds=["colour"], max_objects=1):
        others = [colour for colour in COLOURS if colour != row["answer"]]
        hint = row["answer"] if rng.random() < agrees else rng.choice(others)
        (message,) = row["prompt"]
        image, text = message["content"]
        content = [image, {**text, "text": f"{text['text']} {hint}?"}]
        found.append({**row, "prompt": [{**message, "content": content}], "hint": hint})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = curves.parser(__doc__ or "", lessons=300, steps=60)
    parser.add_argument("--rules", nargs="+", default=["none", "pgpo", "vppo"])
    given = parser.parse_args(arguments)
    base, rng = given.out / "base", random.Random(9)

    def reply(row: curves.Row) -> str:
        """A copy of the hint, what is there, or a guess."""
        drawn, guess = rng.random(), rng.choice([*COLOURS])
        return str(row["hint"] if drawn < COPIES else row["answer"] if drawn < COPIES + LOOKS else guess)

    if not base.exists():
        curves.make_base(base, rows("train", curves.BATCH * given.lessons, 0.2, 9), reply)

    def curve(rule: str, seed: int) -> list[dict[str, float]]:
        settings = {
            "algorithm": {"credit": None if rule == "none" else rule},
            "run": {"sight_every": curves.EVERY, "guards": {"sight_lost": "off"}},
        }
        held = {"wrong_hint": rows("heldout", 200, 0.0, 2), "right_hint": rows("heldout", 100, 1.0, 3)}
        return curves.run(given, rule, seed, settings, train=rows("train", 4000, AGREES, 1), held=held)

    kept = ("eval/wrong_hint/score", "eval/right_hint/score", "sight/nats", "reward")
    curves.compare(given, given.rules, curve, "shortcut.json", kept)


if __name__ == "__main__":
    main()
