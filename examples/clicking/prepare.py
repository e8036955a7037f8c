"""Brings rootsautomation/ScreenSpot onto the disk, in the form that config.yaml reads.

    python examples/clicking/prepare.py --out data/clicking     # needs a network, some 600 MB of download

As published, a row has `image` (a screenshot), `file_name`, `instruction`, `bbox` ([x0, y0, x1, y1] as shares
of the picture's width and height), `data_type` (text or icon) and `data_source` (ios, windows, ...). There is
one split, `test`, of 1,272 rows; several are about one screenshot. A hash of `file_name` keeps a fifth of the
screens for evaluation. `to_row` is the whole mapping.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare, published

HUB, SPLIT = "rootsautomation/ScreenSpot", "test"
HELDOUT_SHARE = 0.2
QUESTION = (
    "Where on the screen do you click to do this: {instruction}? Think first, inside <think> </think>. Then give the "
    "point in pixels as (x, y), inside <answer> </answer>."
)


def to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published row as ours: the instruction inside a question, the screenshot, and the target."""
    return {
        "prompt": QUESTION.format(instruction=row["instruction"].strip().rstrip(" ?.!")),
        "image": row["image"],
        "target": list(row["bbox"]),
        "data_type": row["data_type"],
        "data_source": row["data_source"],
    }


def is_held_out(file_name: str) -> bool:
    """Return True if a screenshot is for evaluation: a pure function of its name."""
    digest = hashlib.sha256(file_name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Write {HUB} as JSONL files with images beside them.")
    parser.add_argument("--out", type=Path, default=Path("data/clicking"))
    parser.add_argument("--hub", default=HUB, help="another dataset of the hub with these columns")
    parser.add_argument("--split", default=SPLIT, help="its split")
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)

    def rows(held_out: bool) -> Iterator[dict[str, Any]]:
        for row in published(args.hub, args.split):
            if is_held_out(row["file_name"]) == held_out:
                yield to_row(row)

    prepare(args.out / "train.jsonl", lambda: rows(False), again=args.again)
    prepare(args.out / "eval.jsonl", lambda: rows(True), again=args.again)


if __name__ == "__main__":
    exits(main)
