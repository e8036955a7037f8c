"""Brings leonardPKU/clevr_cogen_a_train onto the disk, in the form that config.yaml reads.

    python examples/clevr_count/prepare.py --out data/clevr_count     # needs a network, a GB or so of disk

As published, a row has `image` (a PNG of 480 x 320), `problem` (a question) and `solution` (a number in
tags: "<answer> 3 </answer>"). There is one split, `train`, of about 70,000 rows; the last 500 of them are
kept for evaluation here. `to_row` is the whole mapping.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare, published

HUB = "leonardPKU/clevr_cogen_a_train"
HELD_OUT = 500
INSTRUCTION = "Think first, inside <think> </think>. Then give the number alone, inside <answer> </answer>."


def to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published row as ours: the question with the instruction, the image, and the bare number as text."""
    match = re.search(r"<answer>\s*(.*?)\s*</answer>", row["solution"], re.DOTALL)
    answer = match.group(1) if match else row["solution"].strip()
    return {"prompt": f"{row['problem']} {INSTRUCTION}", "image": row["image"], "answer": answer}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Write {HUB} as JSONL files with images beside them.")
    parser.add_argument("--out", type=Path, default=Path("data/clevr_count"))
    parser.add_argument("--rows", type=int, default=None, help="training rows; all of them by default")
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)

    def rows(held_out: bool) -> Iterator[dict[str, Any]]:
        dataset = published(HUB, "train")
        train_size = len(dataset) - min(HELD_OUT, len(dataset) // 10)
        last = train_size if args.rows is None else min(args.rows, train_size)
        indices = range(train_size, len(dataset)) if held_out else range(last)
        return (to_row(dataset[index]) for index in indices)

    prepare(args.out / "train.jsonl", lambda: rows(False), again=args.again)
    prepare(args.out / "eval.jsonl", lambda: rows(True), again=args.again)


if __name__ == "__main__":
    exits(main)
